"""The whole engine, offline, against `transformers`: every family, whatever chunks, pages, caches and batches."""

import dataclasses
import json

import pytest

from tests.tiny_checkpoints import ALL_FAMILIES, HYBRID, make_checkpoint
from tests.vlmserve.reference import Reference, ask, assert_equal_answers, conversations, known, over, picture
from vlmserve import LLM, SamplingOverrides
from vlmserve_common.errors import BadRequestError

NEW = 12
GREEDY = SamplingOverrides(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)


SETTINGS = [
    {},
    {"chunked_prefill_size": 16, "page_size": 1},
    {"chunked_prefill_size": 16, "page_size": 16, "enable_mixed_chunk": True},
    {"chunked_prefill_size": -1, "disable_radix_cache": True, "max_running_requests": 2},
    {"chunked_prefill_size": 64, "page_size": 1, "schedule_policy": "lpm", "encoder_cache_mib": 0},
    # room for little more than the longest request: eviction and retraction
    {"max_total_tokens": 512, "page_size": 4, "schedule_conservativeness": 0.01},
]
OFTEN = ("qwen3_vl", HYBRID)  # which differ in what they cache
by_cache = pytest.mark.parametrize("family", OFTEN, indirect=True)
by_any = pytest.mark.parametrize("family", OFTEN[:1], indirect=True)


@pytest.fixture(scope="module")
def family(request, tmp_path_factory):
    return known(request.param, tmp_path_factory.mktemp(request.param), conversations(), NEW)


def check(llm, asked, wanted):
    for got, want in zip(llm.chat_batch(asked, GREEDY, num_logprobs=2), wanted, strict=True):
        assert_equal_answers(got, want)
    stats = llm.stats()  # the pools balanced when the scheduler went idle, or it would have raised
    assert stats.kv_free_tokens + stats.kv_cached_tokens == stats.kv_total_tokens
    assert stats.req_pool_free == stats.req_pool_total


@over((*ALL_FAMILIES, HYBRID), SETTINGS, OFTEN)
def test_equals_transformers(family, settings):
    folder, asked, wanted = family
    with LLM(str(folder), num_threads=1, **settings) as llm:
        check(llm, asked, wanted)
        check(llm, asked[::-1], wanted[::-1])  # again, with warm caches and other batch mates


@by_cache
def test_alone_equals_together(family):
    folder, asked, wanted = family
    with LLM(str(folder), num_threads=1) as llm:
        for messages, want in zip(asked, wanted, strict=True):
            check(llm, [messages], [want])


@by_cache
def test_a_prompt_asked_again_is_cached_and_its_picture_not_encoded_again(family):
    folder, asked, _ = family
    with LLM(str(folder), num_threads=1) as llm:
        first = llm.chat(asked[1], GREEDY)
        encoded = llm.stats().encoder.encoded
        again = llm.chat(asked[1], GREEDY)
        assert first.cached_tokens == 0
        # in whole pages; of hybrid models, where a chunk of the delta rule ends
        unit = 64 if "qwen3_5" in folder.name else 16
        assert again.cached_tokens >= (again.prompt_tokens - 1) // unit * unit
        assert again.token_ids == first.token_ids
        assert llm.stats().encoder.encoded == encoded == 1
        llm.flush_cache()
        assert llm.chat(asked[1], GREEDY).cached_tokens == 0


@by_cache
def test_sampling_depends_on_the_seed_and_not_on_batch_mates(family):
    folder, asked, _ = family
    with LLM(str(folder), num_threads=1, chunked_prefill_size=16) as llm:
        random = dataclasses.replace(GREEDY, temperature=1.0, seed=11)
        alone = [llm.chat(messages, random).token_ids for messages in asked[:4]]
        together = [done.token_ids for done in llm.chat_batch(asked[:4], random)]
        assert alone == together
        assert llm.chat(asked[0], dataclasses.replace(random, seed=12)).token_ids != alone[0]


@by_any
def test_stop_strings_and_limits(family):
    folder, asked, _ = family
    with LLM(str(folder), num_threads=1) as llm:
        text = llm.chat(asked[0], GREEDY).text
        stop = text[len(text) // 2 : len(text) // 2 + 2]
        cut = llm.chat(asked[0], dataclasses.replace(GREEDY, stop=(stop,)))
        assert cut.text == text[: text.find(stop)]
        assert cut.finish_reason == "stop"
        with pytest.raises(BadRequestError, match="--max-model-len"):
            llm.chat(ask("word " * 9000), GREEDY)
        assert llm.chat(asked[0], GREEDY).text == text


@by_any
def test_a_picture_that_differs_in_one_corner_is_another_picture(family):
    folder, _, _ = family
    first, second = picture(1, 112, 112), picture(1, 112, 112)
    second.paste((255, 0, 0), (0, 0, 56, 56))
    with LLM(str(folder), num_threads=1) as llm:
        a, b = (llm.chat(ask("Look closely.", image), GREEDY, num_logprobs=0) for image in (first, second))
        assert b.cached_tokens <= 16
        assert a.logprobs != b.logprobs


@by_any
def test_more_prompts_than_may_wait(family):
    folder, asked, wanted = family
    with LLM(str(folder), num_threads=1, max_queued_requests=2, max_running_requests=2) as llm:
        check(llm, asked, wanted)


@by_cache
@pytest.mark.parametrize("overlap", [True, False])
def test_an_interruption_leaves_nothing_behind(family, overlap, monkeypatch):
    """In the wait for a step's result, or where steps do not overlap, in its computation."""
    folder, asked, wanted = family
    with LLM(str(folder), num_threads=1, disable_overlap_schedule=not overlap) as llm:
        owner, name = (llm.engine.loop.schedulers[0], "process_batch_result") if overlap else (llm._runner, "forward")
        plain, steps = getattr(owner, name), []

        def interrupted(*given):
            steps.append(given)
            if len(steps) == 3:
                raise KeyboardInterrupt
            return plain(*given)

        monkeypatch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.chat_batch(asked, GREEDY)
        assert (llm.stats().num_running_reqs, llm.stats().num_waiting_reqs) == (0, 0)
        check(llm, asked, wanted)


def test_the_checkpoint_s_repetition_penalty_applies(tmp_path):
    folder = make_checkpoint("qwen2_5_vl", tmp_path)
    path = folder / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "repetition_penalty": 1.4}))
    asked = conversations()[:4]
    reference = Reference(folder)
    with LLM(str(folder), num_threads=1) as llm:
        for got, messages in zip(llm.chat_batch(asked, GREEDY), asked, strict=True):
            assert list(got.token_ids) == reference.answer(messages, NEW).token_ids
