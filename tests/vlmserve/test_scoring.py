"""What is returned besides answers, against `transformers`: whatever chunks, caches, batches and steps in flight."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.tiny_checkpoints import FAMILIES, make_checkpoint
from tests.vlmserve.reference import Reference, ask, conversations, over, picture
from vlmserve import LLM, SamplingOverrides
from vlmserve.executor import logprobs as logprobs_module
from vlmserve.frontend.request_builder import ChatPrompt, EmbedsPrompt, GenerateReqInput, TokensPrompt
from vlmserve.frontend.requests import read_input_embeds
from vlmserve.ipc.messages import LogitsProcessorCall, ReturnOptions
from vlmserve_common.errors import BadRequestError, EngineError

NEW = 6
GREEDY = SamplingOverrides(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)
ASKED = (7, 300, 301, 5)
ALL = ReturnOptions(prompt_logprobs=3, token_ids_logprob=ASKED, hidden_states="all")
PROCESSORS = "tests.vlmserve.forbidding:Forbid,tests.vlmserve.forbidding:Fails"
TIGHT = {"max_total_tokens": 512, "page_size": 4, "schedule_conservativeness": 0.01, "chunked_prefill_size": 16}


SETTINGS = [
    {},
    {"chunked_prefill_size": 16, "page_size": 1, "disable_overlap_schedule": True},
    {"chunked_prefill_size": 16, "page_size": 16, "enable_mixed_chunk": True},
    {"chunked_prefill_size": -1, "disable_radix_cache": True, "max_running_requests": 2},
    TIGHT,
]
OFTEN = "qwen3_vl"
by_any = pytest.mark.parametrize("family", [OFTEN], indirect=True)


@pytest.fixture(scope="module")
def family(request, tmp_path_factory):
    folder = make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    reference = Reference(folder)
    asked = conversations()
    answers = [reference.answer(messages, NEW) for messages in asked]
    wanted = [reference.forward(chat, answer.token_ids) for chat, answer in zip(asked, answers, strict=True)]
    return folder, asked, wanted, reference


def llm_of(folder, **settings):
    return LLM(str(folder), num_threads=1, enable_return_hidden_states=True, **settings)


def check(got, want, returns=ALL):
    """`got` is a `Completion`: everything that was asked about the prompt and the answer."""
    found, length, start = got.prompt_logprobs, want.prompt, returns.logprob_start_len
    assert (found.start, len(found.logprobs)) == (start, length - start)
    assert found.token_ids.tolist() == want.input_ids[start:length]
    for row, position in enumerate(range(start, length)):
        if position == 0:
            assert np.isnan(found.logprobs[0])
            continue
        theirs = want.logprobs[position - 1]
        assert found.logprobs[row] == pytest.approx(theirs[found.token_ids[row]], abs=1e-4)
        best = np.sort(theirs)[::-1][: returns.prompt_logprobs]
        np.testing.assert_allclose(found.top_logprobs[row], best, atol=1e-4)
        np.testing.assert_allclose(theirs[found.top_ids[row]], best, atol=1e-4)
        np.testing.assert_allclose(found.token_ids_logprobs[row], theirs[list(ASKED)], atol=1e-4)
        rank = (theirs > theirs[found.token_ids[row]] + 1e-4).sum() + 1
        assert rank <= found.ranks[row] <= (theirs > theirs[found.token_ids[row]] - 1e-4).sum() + 1
    if list(got.token_ids) == want.input_ids[length:]:  # no tie was decided otherwise
        np.testing.assert_allclose(got.hidden_states, want.hidden[length - 1 : -1], atol=2e-4)
        for place, entry in enumerate(got.logprobs):
            theirs = want.logprobs[length - 1 + place]
            assert entry.logprob == pytest.approx(theirs[entry.token_id], abs=1e-4)
            np.testing.assert_allclose(entry.token_ids_logprobs, theirs[list(ASKED)], atol=1e-4)


@over(FAMILIES, SETTINGS, [OFTEN])
def test_equals_transformers(family, settings, monkeypatch):
    folder, asked, wanted, _ = family
    monkeypatch.setattr(logprobs_module, "_TILE_BYTES", 4 * 448 * 5)  # five rows at a time
    with llm_of(folder, **settings) as llm:
        for order in (1, -1):  # again, with warm caches and other batch mates
            answers = llm.chat_batch(asked[::order], GREEDY, num_logprobs=1, returns=ALL)
            for got, want in zip(answers, wanted[::order], strict=True):
                check(got, want)
        for chat, want in zip(asked, wanted, strict=True):  # the rest of the prompt comes from the cache
            late = dataclasses.replace(ALL, logprob_start_len=want.prompt - 5)
            got = llm.chat(chat, GREEDY, num_logprobs=1, returns=late)
            check(got, want, late)
            if not llm.args.disable_radix_cache and settings is not TIGHT:
                page = llm.args.page_size
                assert got.cached_tokens == (want.prompt - 6) // page * page


@by_any
def test_without_an_answer_nothing_is_sampled_or_decoded(family):
    folder, asked, wanted, _ = family
    returns = ReturnOptions(prompt_logprobs=0, hidden_states="last")
    with llm_of(folder, chunked_prefill_size=16) as llm:
        answers = llm.chat_batch(asked, max_tokens=0, returns=returns)
        for got, want in zip(answers, wanted, strict=True):
            assert (got.token_ids, got.text, got.finish_reason) == ((), "", "length")
            np.testing.assert_allclose(got.hidden_states, want.hidden[want.prompt - 1 : want.prompt], atol=2e-4)
            theirs = [want.logprobs[p - 1][want.input_ids[p]] for p in range(1, want.prompt)]
            np.testing.assert_allclose(got.prompt_logprobs.logprobs[1:], theirs, atol=1e-4)
        assert llm.stats().generation_tokens_total == 0


@by_any
def test_labels_of_a_chat_with_pictures(family):
    folder, asked, _, reference = family
    labels = ["yes", "no", "a red circle"]
    chats = [asked[1], asked[3], asked[0]]
    with llm_of(folder) as llm:
        found = llm.score_batch(chats, labels)
        for scores, chat in zip(found, chats, strict=True):
            for score, label in zip(scores, labels, strict=True):
                ids = llm.builder.tokenizer.encode(label)
                assert (score.label, list(score.token_ids)) == (label, ids)
                want = reference.forward(chat, ids)
                theirs = [want.logprobs[want.prompt - 1 + k][token] for k, token in enumerate(ids)]
                np.testing.assert_allclose(score.logprobs, theirs, atol=1e-4)
                assert score.logprob == pytest.approx(sum(theirs), abs=3e-4)
            assert sum(score.probability for score in scores) == pytest.approx(1)
        before = llm.stats()
        assert llm.score(chats[1], labels)[2].logprob == pytest.approx(found[1][2].logprob, abs=1e-4)
        # the chat is cached; what is computed of it is its last page at the most, once for each label
        prompt = reference.forward(chats[1]).prompt
        cached = llm.stats().cached_tokens_total - before.cached_tokens_total
        assert cached == (prompt - 1) // 16 * 16 * len(labels)
        assert llm.stats().encoder.encoded == before.encoder.encoded


@by_any
def test_other_distributions(family):
    folder, asked, wanted, _ = family
    want = torch.from_numpy(wanted[2].logprobs)
    scaled = torch.log_softmax(want / 0.6, -1).numpy()
    with llm_of(folder) as llm:

        def ask_for(**options):
            returns = ReturnOptions(prompt_logprobs=0, token_ids_logprob=ASKED, **options)
            return llm.chat(asked[2], temperature=0.6, top_p=0.7, max_tokens=1, num_logprobs=3, seed=1, returns=returns)

        plain, tempered = ask_for(), ask_for(temp_scaled_logprobs=True)
        assert plain.token_ids == tempered.token_ids
        length, ids = wanted[2].prompt, wanted[2].input_ids
        for got, theirs in ((plain, wanted[2].logprobs), (tempered, scaled)):
            rows = [theirs[p - 1][ids[p]] for p in range(1, length)]
            np.testing.assert_allclose(got.prompt_logprobs.logprobs[1:], rows, atol=1e-4)
            np.testing.assert_allclose(got.logprobs[0].token_ids_logprobs, theirs[length - 1][list(ASKED)], atol=1e-4)
        cut = ask_for(temp_scaled_logprobs=True, top_p_normalized_logprobs=True)
        row = scaled[length - 1]
        order = np.argsort(-row)
        keep = order[: int((np.exp(row[order]).cumsum() < 0.7).sum()) + 1]
        inside = row[keep] - np.log(np.exp(row[keep]).sum())
        top = dict(zip(cut.logprobs[0].top_ids, cut.logprobs[0].top_logprobs, strict=True))
        for token, logprob in top.items():
            expected = dict(zip(keep.tolist(), inside.tolist(), strict=True)).get(token, -np.inf)
            assert logprob == pytest.approx(expected, abs=1e-4)
        assert cut.logprobs[0].token_id in keep
        with pytest.raises(BadRequestError, match="temp_scaled_logprobs is true; it must be false where temperature"):
            llm.chat(asked[0], GREEDY, returns=ReturnOptions(temp_scaled_logprobs=True))


@by_any
@pytest.mark.parametrize("overlap", [False, True])
def test_logits_processors_see_all_tokens_before(family, overlap):
    folder, asked, _, _ = family
    with llm_of(folder, logits_processors=PROCESSORS, disable_overlap_schedule=not overlap) as llm:
        plain = llm.chat_batch(asked, GREEDY)
        forbidden = sorted({token for answer in plain for token in answer.token_ids[:1]})
        call = LogitsProcessorCall(name="forbid", params={"ids": forbidden, "again": True})
        answers = llm.chat_batch(asked, GREEDY, logits_processors=[call])
        for answer in answers:
            assert not set(answer.token_ids) & set(forbidden)
            assert len(set(answer.token_ids)) == NEW
        failing = LogitsProcessorCall(name="Fails", params={"at": 3})
        with pytest.raises(EngineError, match="the logits processor 'Fails' failed: RuntimeError"):
            llm.chat(asked[1], GREEDY, logits_processors=[failing])
        assert [answer.token_ids for answer in llm.chat_batch(asked, GREEDY)] == [one.token_ids for one in plain]
        with pytest.raises(BadRequestError, match="there is no logits processor 'os', only: forbid, Fails"):
            llm.chat(asked[1], GREEDY, logits_processors=[LogitsProcessorCall(name="os")])
        with pytest.raises(BadRequestError, match="forbid needs ids"):
            llm.chat(asked[1], GREEDY, logits_processors=[LogitsProcessorCall(name="forbid")])


@by_any
def test_embeddings_in_place_of_tokens(family):
    folder, _, _, reference = family
    table = reference.model.get_input_embeddings().weight.detach()
    ids = reference.processor.tokenizer.encode("Name a colour, please, of the blue square" * 3)
    with llm_of(folder, chunked_prefill_size=16) as llm:
        want = llm.generate([TokensPrompt(ids=tuple(ids))], GREEDY, num_logprobs=0)[0]
        given = read_input_embeds(table[ids])
        # beside a picture, whose embeddings are wider where there is DeepStack
        [got] = llm.generate([EmbedsPrompt(embeds=given)], GREEDY, num_logprobs=0)
        assert (got.token_ids, got.cached_tokens) == (want.token_ids, 0)
        for a, b in zip(got.logprobs, want.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-5)
        [again] = llm.generate([EmbedsPrompt(embeds=read_input_embeds(table[ids].numpy()))], GREEDY)
        assert again.token_ids == want.token_ids
        assert again.cached_tokens == (len(ids) - 1) // 16 * 16
        other = table[ids].clone()
        other[20] += 0.5  # shares what comes before
        [changed] = llm.generate([EmbedsPrompt(embeds=read_input_embeds(other))], GREEDY, num_logprobs=0)
        assert changed.cached_tokens == 16
        assert changed.logprobs[0].logprob != got.logprobs[0].logprob
        # answers of a half-precision table are those of its values
        rounded = table[ids].bfloat16()
        assert (read_input_embeds(rounded).rows == rounded.float().numpy()).all()
        mixed = llm.generate([EmbedsPrompt(embeds=given), TokensPrompt(ids=tuple(ids))], GREEDY)
        assert [answer.token_ids for answer in mixed] == [want.token_ids] * 2


@by_any
def test_what_is_wrong_is_told(family):
    folder, asked, _, reference = family
    width = reference.model.get_input_embeddings().weight.shape[1]
    bad = np.zeros((3, width), dtype=np.float32)
    bad[2, 1] = np.inf
    with pytest.raises(BadRequestError, match="input_embeds has a value in row 2 that is not finite"):
        read_input_embeds(bad)
    with pytest.raises(BadRequestError, match=r"input_embeds is an array of int64, \[3\]"):
        read_input_embeds(np.arange(3))
    with LLM(str(folder), num_threads=1, logits_processors=None) as llm:
        with pytest.raises(BadRequestError, match=f"rows of 5 elements; the model's hidden size is {width}"):
            llm.generate([EmbedsPrompt(embeds=read_input_embeds(np.zeros((2, 5), dtype=np.float32)))], GREEDY)
        for returns, complaint in (
            (ReturnOptions(prompt_logprobs=21), "prompt_logprobs is 21; it must be between 0 and 20"),
            (ReturnOptions(prompt_logprobs=1, logprob_start_len=4000), "logprob_start_len is 4000; it must be below"),
            (ReturnOptions(logprob_start_len=1), "logprob_start_len is 1; it must be left out without prompt_logprobs"),
            (ReturnOptions(token_ids_logprob=(448,)), "token_ids_logprob is token id 448; .* below 448"),
            (ReturnOptions(hidden_states="all"), "setting enable_return_hidden_states"),
        ):
            with pytest.raises(BadRequestError, match=complaint):
                llm.chat(asked[0], GREEDY, returns=returns)
        with pytest.raises(BadRequestError, match="max_tokens is 0; it must be at least 1, or 0 with prompt_logprobs"):
            llm.chat(asked[0], max_tokens=0)
        with pytest.raises(BadRequestError, match="label 1 is an empty text"):
            llm.score(asked[0], ["a", ""])
        with pytest.raises(BadRequestError, match="there is no logits processor 'x', only: none"):
            llm.chat(asked[0], GREEDY, logits_processors=[LogitsProcessorCall(name="x")])
    with pytest.raises(EngineError, match="logits_processors: cannot make 'os:nothing'"):
        LLM(str(folder), num_threads=1, logits_processors="os:nothing")


@by_any
def test_a_picture_beside_embeddings_and_scores(family):
    """One step with all of them: the arrays of each are found again."""
    folder, asked, wanted, reference = family
    table = reference.model.get_input_embeddings().weight.detach()
    given = read_input_embeds(table[[*range(20, 60)]])
    with llm_of(folder, enable_mixed_chunk=True, chunked_prefill_size=64, page_size=4) as llm:
        [alone] = llm.generate([EmbedsPrompt(embeds=given)], GREEDY)
        llm.flush_cache()
        more = {"num_logprobs": 1, "returns": ALL}
        prompts = [(ChatPrompt(messages=chat), more) for chat in asked[:4]]
        prompts.insert(2, (EmbedsPrompt(embeds=given), {}))
        requests = [
            GenerateReqInput(request_id="", prompt=prompt, sampling_params=GREEDY, **given) for prompt, given in prompts
        ]
        first, second, embeds, third, fourth = (answer for [answer] in llm._run(requests))
        for got, want in zip((first, second, third, fourth), wanted, strict=False):
            check(got, want)
        assert embeds.token_ids == alone.token_ids
        [message] = conversations()[0]
        assert llm.chat(ask(picture(1, 96, 64), message["content"]), GREEDY).token_ids
