"""A gated delta net over the steps of an engine: wherever prompts are cut, and whoever is in the batch. By torch, and
by the kernels of a GPU."""

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from tests.tiny_checkpoints import HYBRID, make_checkpoint
from tests.vlmserve.models.launch_counter import launches
from tests.vlmserve_common.kernels.triton_device import DEVICE
from vlmserve.engine.recurrent import state_shape
from vlmserve.memory.recurrent_cache import GuessCache, GuessedTokens, RecurrentCache, RecurrentStep, Span
from vlmserve.memory.recurrent_states import StateCopy
from vlmserve.models.delta_net import GatedDeltaNet
from vlmserve.models.registry import load_model
from vlmserve_common.kernels import fused

TOKENS = 300


@pytest.fixture(autouse=True, params=["torch", pytest.param("triton", marks=pytest.mark.slow)])
def operators(request):
    """What computes: torch, or the kernels of a GPU under Triton's interpreter."""
    if request.param == "triton" and (find_spec("triton") is None or DEVICE.type != "cpu"):
        pytest.skip("needs Triton's interpreter")
    fused.activate(request.param, torch.device("cpu"))
    return request.param


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    """The second recurrent layer of a model, and its configuration."""
    model = load_model(make_checkpoint(HYBRID, tmp_path_factory.mktemp(HYBRID)))
    layers = [layer.linear_attn for layer in model.language_model.layers]
    return [layer for layer in layers if isinstance(layer, GatedDeltaNet)][1], model.config


def new_cache(config) -> RecurrentCache:
    return RecurrentCache(4, state_shape(config, torch.float32), torch.device("cpu"))


def run(net, x, cache, spans=(), singles=(), guessed=()) -> torch.Tensor:
    """singles: pairs of a token of x and a state."""
    tokens, states = torch.tensor(singles, dtype=torch.int64).view(-1, 2).T.contiguous()
    step = RecurrentStep(
        cache=cache,
        spans=tuple(spans),
        guessed=tuple(guessed),
        single_states=states if len(singles) else None,
        single_tokens=tokens if 0 < len(singles) < len(x) else None,
    )
    return net(x, SimpleNamespace(recurrent=step), residual=torch.zeros_like(x))


@torch.inference_mode()
@pytest.mark.parametrize(
    ("cuts", "exact"),
    [((64,), True), ((128, 192), True), ((64, 128, 192, 256), True), ((5, 70, 71, 200), False), ((1, 2, 3), False)],
)
def test_a_prompt_in_chunks(net, cuts, exact):
    net, config = net
    x = torch.randn(TOKENS, config.hidden_size, generator=torch.Generator().manual_seed(3))
    cache = new_cache(config)
    whole = run(net, x, cache, [Span(start=0, length=TOKENS, prefix_len=0, state=1)])
    outs = []
    for start, end in zip((0, *cuts), (*cuts, TOKENS), strict=True):
        if end - start == 1:
            outs.append(run(net, x[start:end], cache, singles=[(0, 2)]))
        else:
            outs.append(run(net, x[start:end], cache, [Span(start=0, length=end - start, prefix_len=start, state=2)]))
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(torch.cat(outs), whole, **tolerance)
    for part in (cache.conv, cache.recurrent):
        torch.testing.assert_close(part[2], part[1], **tolerance)
        assert part[1, 1].abs().max() > 0
        assert not part[:, 0].any(), "the other layer's"
        assert not part[[0, 3, 4]].any()


@torch.inference_mode()
def test_snapshots_are_what_a_shorter_prompt_leaves(net):
    net, config = net
    x = torch.randn(TOKENS, config.hidden_size, generator=torch.Generator().manual_seed(4))
    cache = new_cache(config)
    kept = {64: 2, 192: 3}
    run(net, x, cache, [Span(start=0, length=TOKENS, prefix_len=0, state=1, kept=kept)])
    for end, state in kept.items():
        run(net, x[:end], cache, [Span(start=0, length=end, prefix_len=0, state=4)])
        assert torch.equal(cache.recurrent[state], cache.recurrent[4])
        assert torch.equal(cache.conv[state], cache.conv[4])
        cache.copy([StateCopy(source=0, target=4)])
        assert not cache.recurrent[4].any()


@torch.inference_mode()
def test_batch_mates_change_nothing(net):
    net, config = net
    x = torch.randn(TOKENS, config.hidden_size, generator=torch.Generator().manual_seed(5))
    cache, alone = new_cache(config), new_cache(config)
    firsts = [Span(start=0, length=60, prefix_len=0, state=1), Span(start=60, length=70, prefix_len=0, state=2)]
    outs = [run(net, x[:130], cache, firsts)]
    # a token of each of two, and a prompt between them
    third = Span(start=1, length=40, prefix_len=0, state=3)
    outs.append(run(net, x[130:172], cache, [third], singles=[(0, 1), (41, 2)]))
    outs.append(run(net, x[172:174], cache, singles=[(0, 2), (1, 1)]))
    got = torch.cat(outs)
    for state, rows in ((1, [*range(60), 130, 173]), (2, [*range(60, 130), 171, 172]), (3, [*range(131, 171)])):
        own, length = x[rows], 60 if state == 1 else 70 if state == 2 else 40
        want = [run(net, own[:length], alone, [Span(start=0, length=length, prefix_len=0, state=state)])]
        want += [run(net, own[i : i + 1], alone, singles=[(0, state)]) for i in range(length, len(rows))]
        torch.testing.assert_close(got[rows], torch.cat(want), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(cache.recurrent, alone.recurrent, rtol=1e-5, atol=1e-6)


@torch.inference_mode()
@pytest.mark.parametrize("right", [1, 2, 4])
def test_a_state_goes_back_behind_wrong_guesses(net, right):
    """Of two requests with guesses, beside one that decodes; a snapshot is made on the way."""
    net, config = net
    x = torch.randn(90, config.hidden_size, generator=torch.Generator().manual_seed(6))
    cache, alone = new_cache(config), new_cache(config)
    cache.guesses = GuessCache(3, 5, state_shape(config, torch.float32), torch.device("cpu"))
    for part in (cache.guesses.keys, cache.guesses.corrections, cache.guesses.decay):
        part.fill_(torch.nan)  # of an earlier step with more guesses
    for caches in (cache, alone):
        for state in (1, 2):
            span = Span(start=0, length=20 + state, prefix_len=0, state=state)
            run(net, x[30 * state :][: span.length], caches, [span])
    before = cache.recurrent.clone()
    tokens = torch.stack([torch.arange(4), torch.arange(5, 9)])
    guessed = GuessedTokens(tokens=tokens, states=torch.tensor([1, 2]), rows=torch.tensor([2, 0]))
    out = run(net, x[:9], cache, singles=[(4, 3)], guessed=[guessed])
    assert torch.equal(cache.recurrent[1:3], before[1:3])
    for state, rows in ((1, tokens[0]), (2, tokens[1])):
        want = run(net, x[rows][:right], alone, [Span(start=0, length=right, prefix_len=20, state=state)])
        torch.testing.assert_close(out[rows][:right], want, rtol=1e-4, atol=1e-5)
    jobs = [(1, 2, right, 1), (2, 0, right, 2), (1, 2, 1, 4)]
    cache.advance(*torch.tensor(jobs).T)
    for part, want in ((cache.recurrent, alone.recurrent), (cache.conv, alone.conv)):
        torch.testing.assert_close(part[1:3, 1], want[1:3, 1], rtol=1e-4, atol=1e-5)
    assert torch.allclose(cache.recurrent[4, 1], cache.recurrent[1, 1], rtol=1e-4, atol=1e-5) == (right == 1)


@torch.inference_mode()
def test_launches_of_a_decode_step(net, operators):
    """Three products, and three launches between them."""
    net, config = net
    x, cache = torch.ones(2, config.hidden_size), new_cache(config)
    for _ in range(2):  # the first time there is a trial
        with launches() as names:
            run(net, x, cache, singles=[(0, 1), (1, 2)])
    names = names[names.index("linear") :]
    if operators == "triton":
        between = ["convolve_few_kernel", "few_kernel", "gated_rms_norm_kernel"]
        assert names[:-1] == ["linear", "linear", *between, "linear"], names  # and the residual
    else:
        assert len(names) > 50
