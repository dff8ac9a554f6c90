"""N-gram embeddings over the steps of an engine, and their tables in checkpoints."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.tiny_checkpoints import STREAMED, make_checkpoint
from vlmserve.engine.recurrent import state_shape
from vlmserve.memory.recurrent_cache import GuessCache, GuessedTokens, RecurrentCache, RecurrentStep, Span
from vlmserve.models.qwen4_exp.ngrams import NGramTable, ngram_contexts, take_stored_tables
from vlmserve.models.registry import load_model
from vlmserve_common.checkpoint.weights import stored_cuts, stored_elsewhere, stored_tensors
from vlmserve_common.compute.communicator import Communicator
from vlmserve_common.compute.shard import Shard
from vlmserve_common.errors import CheckpointError

TOKENS = 40


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(make_checkpoint(STREAMED, tmp_path_factory.mktemp(STREAMED)))


@pytest.fixture
def ids(model):
    made = torch.randint(10, 300, (TOKENS,), generator=torch.Generator().manual_seed(1))
    made[[0, 7, 8, 20]] = model.config.ngrams.end_id
    return made


def by_hand(ids, end: int) -> list[list[int]]:
    """Each token and the two before it, none of which lies before the start or the end of a document."""
    found = []
    for at, token in enumerate(ids.tolist()):
        context, open_ = [token], True
        for before in (at - 1, at - 2):
            earlier = ids[before].item() if before >= 0 and open_ else end
            open_ = open_ and earlier != end
            context.append(earlier)
        found.append(context)
    return found


def new_cache(model) -> RecurrentCache:
    return RecurrentCache(4, state_shape(model.config, torch.float32), torch.device("cpu"))


def kept_ids(model, cache, state: int) -> list[int]:
    return (cache.ngram_ids[state] + model.config.ngrams.end_id).tolist()


def cut(ids, cache, cuts, state=1, kept=None):
    """Go over ids in pieces; yield the step of each."""
    for start, end in zip((0, *cuts), (*cuts, len(ids)), strict=True):
        if end - start == 1:
            yield slice(start, end), RecurrentStep(cache=cache, spans=(), single_states=torch.tensor([state]))
        else:
            own = {at - start: place for at, place in (kept or {}).items() if start < at < end}
            span = Span(start=0, length=end - start, prefix_len=start, state=state, kept=own)
            yield slice(start, end), RecurrentStep(cache=cache, spans=(span,))


@pytest.mark.parametrize("cuts", [(), (1, 2, 3, 9, 10, 21), (5, 30), tuple(range(1, TOKENS))])
def test_contexts_are_the_same_wherever_a_prompt_is_cut(model, ids, cuts):
    ngrams, cache = model.config.ngrams, new_cache(model)
    made = [ngram_contexts(ngrams, ids[own], step) for own, step in cut(ids, cache, cuts)]
    assert torch.cat(made).tolist() == by_hand(ids, ngrams.end_id)
    assert kept_ids(model, cache, 1) == ids[-2:].tolist()
    assert kept_ids(model, cache, 0) == [ngrams.end_id] * 2


@torch.inference_mode()
@pytest.mark.parametrize("cuts", [(1, 2, 3, 9, 10, 21), (5, 30), tuple(range(1, TOKENS))])
def test_embeddings_are_the_same_wherever_a_prompt_is_cut(model, ids, cuts):
    layer, ngrams = model.language_model.layers[2].ple, model.config.ngrams
    x = torch.randn(TOKENS, model.config.stream_size, generator=torch.Generator().manual_seed(2))

    def run(cuts, state, kept=None):
        cache, made = new_cache(model), []
        for own, step in cut(ids, cache, cuts, state, kept):
            contexts = ngram_contexts(ngrams, ids[own], step)
            made.append(layer(x[own], SimpleNamespace(recurrent=step, ngrams=contexts)))
        return torch.cat(made), cache

    whole, cache = run((), 1, {12: 3, 30: 4})
    pieces, other = run(cuts, 2)
    torch.testing.assert_close(pieces, whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(other.ngram_conv[2], cache.ngram_conv[1], rtol=1e-5, atol=1e-5)
    assert not cache.ngram_conv[1, 0].any(), "the other layer's"
    for end, place in {12: 3, 30: 4}.items():
        assert kept_ids(model, cache, place) == ids[end - 2 : end].tolist()
        made = list(cut(ids[:end], shorter := new_cache(model), (), 1))
        contexts = ngram_contexts(ngrams, ids[:end], made[0][1])
        layer(x[:end], SimpleNamespace(recurrent=made[0][1], ngrams=contexts))
        torch.testing.assert_close(cache.ngram_conv[place], shorter.ngram_conv[1], rtol=1e-5, atol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("right", [1, 2, 3, 4])
def test_wrong_guesses_leave_nothing_behind(model, ids, right):
    layer, ngrams = model.language_model.layers[0].ple, model.config.ngrams
    x = torch.randn(TOKENS, model.config.stream_size, generator=torch.Generator().manual_seed(3))
    shape = state_shape(model.config, torch.float32)
    cache, before = new_cache(model), 10
    cache.guesses = GuessCache(3, 6, shape, torch.device("cpu"))

    def run(step, own):
        return layer(x[own], SimpleNamespace(recurrent=step, ngrams=ngram_contexts(ngrams, ids[own], step)))

    for own, step in cut(ids[:before], cache, ()):
        run(step, own)
    guessed = GuessedTokens(tokens=torch.arange(4)[None], states=torch.tensor([1]), rows=torch.tensor([2]))
    made = run(RecurrentStep(cache=cache, spans=(), guessed=(guessed,)), slice(before, before + 4))
    assert kept_ids(model, cache, 1) == ids[before - 2 : before].tolist(), "the state stays as it is"
    one = torch.tensor([1])
    cache.advance(one, torch.tensor([2]), torch.tensor([right]), one)
    end = before + right
    alone = new_cache(model)
    for own, step in cut(ids[:end], alone, (before,)):
        want = run(step, own)
    torch.testing.assert_close(made[:right], want, rtol=1e-5, atol=1e-5)
    assert kept_ids(model, cache, 1) == kept_ids(model, alone, 1) == ids[end - 2 : end].tolist()
    torch.testing.assert_close(cache.ngram_conv[1, 0], alone.ngram_conv[1, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_processes_have_rows_of_a_table(model, size):
    """Each row is at one process, whatever tensors it is stored in, and what others have is passed over."""
    ngrams, found = model.config.ngrams, {}
    for rank in range(size):
        with torch.device("meta"):
            part = nn.ModuleDict({"t": NGramTable(ngrams, 1, Communicator(Shard(rank, size)))})
        rows = [100, 200, 4, ngrams.rows(1) - 304]
        take_stored_tables(part, {f"t.shard_{number}.weight": (count, 8) for number, count in enumerate(rows)})
        cuts, starts = stored_cuts(part), [0, 100, 300, 304]
        here = dict(stored_tensors(part))
        for number, (start, count) in enumerate(zip(starts, rows, strict=True)):
            name = f"t.shard_{number}.weight"
            assert (name in here) != name.startswith(stored_elsewhere(part) or ("-",))
            if name in here:
                first = start + (cuts[name].start if name in cuts else 0)
                assert name not in cuts or cuts[name].whole == count
                found |= {row: rank for row in range(first, first + len(here[name])) if row not in found}
        assert sum(len(one) for one in here.values()) == len(part["t"].weight[: part["t"].cut.size])
    assert sorted(found) == [*range(ngrams.rows(1))]


def test_hashes_of_a_checkpoint_are_taken(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = make_checkpoint(STREAMED, tmp_path)
    file = folder / "model.safetensors"
    prefix, tensors = "model.language_model.layers.2.ple.ple_embedding", load_file(file)
    tensors[f"{prefix}.layer_multipliers"] = torch.tensor([3, 5, 7])
    save_file(tensors, file)
    embedding = load_model(folder).language_model.layers[2].ple.ple_embedding
    assert embedding.hashes.multipliers == (3, 5, 7)
    sizes, offsets = embedding.hashes.sizes, embedding.hashes.offsets
    a, b = 20 * 3 ^ 21 * 5, 20 * 3 ^ 21 * 5 ^ 22 * 7
    rows = [(a if head < 3 else b) % sizes[head] + offsets[head] for head in range(6)]
    want = embedding.ngram_embedding.weight[rows].flatten()
    assert torch.equal(embedding(torch.tensor([[20, 21, 22]]))[0], want)
    tensors[f"{prefix}.ngram_heads_offsets"] = torch.tensor([0, 1, 2, 3, 4, 10**6])
    save_file(tensors, file)
    with pytest.raises(CheckpointError, match=r"rows 1000000 \.\. \d+ of a table of \d+ rows"):
        load_model(folder)
