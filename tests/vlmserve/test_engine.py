"""The whole engine, offline, against `transformers`: every family, whatever chunks, pages, caches and batches."""

import dataclasses
import json
import logging
from functools import reduce

import pytest

from tests.tiny_checkpoints import ALL_FAMILIES, HYBRID, HYBRID_MOE, STREAMED, make_checkpoint
from tests.vlmserve.reference import Reference, ask, assert_equal_answers, conversations, known, over, picture
from vlmserve import LLM, SamplingOverrides
from vlmserve.ipc.messages import Guesses
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
    done = llm.chat_batch(asked, GREEDY, num_logprobs=2)
    for got, want in zip(done, wanted, strict=True):
        assert_equal_answers(got, want)
    stats = llm.stats()  # the pools balanced when the scheduler went idle, or it would have raised
    assert stats.kv_free_tokens + stats.kv_cached_tokens == stats.kv_total_tokens
    assert stats.req_pool_free == stats.req_pool_total
    return done


@over((*ALL_FAMILIES, HYBRID, STREAMED), SETTINGS, OFTEN)
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
        with pytest.raises(BadRequestError, match="setting max_model_len"):
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


# ---- hybrid models: what is found of a prompt, and what does not go with recurrent layers

WORDS = "How many red circles are there on the left side of the blue square? " * 5


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    """Conversations that begin alike."""
    asked = [
        ask(WORDS, picture(1, 256, 256)),
        ask(WORDS + "Count.", picture(1, 256, 256)),
        ask(WORDS[:150], picture(2, 160, 96)),
        ask(WORDS),
        ask(WORDS + WORDS),
    ]
    return known(HYBRID_MOE, tmp_path_factory.mktemp(HYBRID_MOE), asked, NEW)


def check_hybrid(llm, asked, wanted):
    """How much of each was found."""
    done = check(llm, asked, wanted)
    assert llm.engine.loop.schedulers[0].kv.states.held == 0
    return [answer.cached_tokens for answer in done]


@pytest.mark.parametrize(
    "settings",
    [
        {"page_size": 1, "chunked_prefill_size": 48},
        pytest.param(
            {"page_size": 16, "chunked_prefill_size": 112, "mamba_track_interval": 64}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"page_size": 64, "chunked_prefill_size": -1, "disable_overlap_schedule": True}, marks=pytest.mark.slow
        ),
        {"page_size": 4, "max_total_tokens": 640, "schedule_conservativeness": 0.01, "mamba_cache_mib": 1},
        {"attention_backend": "torch", "cpu_kernels": "off", "max_running_requests": 2},
    ],
    ids=lambda settings: "-".join(f"{k}={v}" for k, v in settings.items()),
)
def test_prefixes_are_found_and_answers_stay(hybrid, settings):
    folder, asked, wanted = hybrid
    with LLM(str(folder), num_threads=1, **settings) as llm:
        check_hybrid(llm, asked, wanted)
        again = check_hybrid(llm, asked[::-1], wanted[::-1])[::-1]
        assert all(found % 64 == 0 for found in again)
        if "max_total_tokens" not in settings:
            assert all(found >= (want.prompt_tokens - 1) // 64 * 64 for found, want in zip(again, wanted, strict=True))


def test_a_turn_goes_on_behind_the_answer_before(hybrid):
    folder, asked, _ = hybrid
    long = SamplingOverrides(temperature=0.0, max_new_tokens=150, ignore_eos=True)
    with LLM(str(folder), num_threads=1, mamba_track_interval=64, page_size=16) as llm:
        first = llm.chat(asked[3], long)
        turns = [*asked[3], {"role": "assistant", "content": first.text}, {"role": "user", "content": "And then?"}]
        second = llm.chat(turns, GREEDY)
        assert second.cached_tokens % 64 == 0
        llm.flush_cache()
        assert llm.chat(turns, GREEDY).token_ids == second.token_ids


def test_without_room_for_snapshots_nothing_is_found(hybrid):
    folder, asked, wanted = hybrid
    for settings in ({"mamba_cache_mib": 0}, {"disable_radix_cache": True}):
        with LLM(str(folder), num_threads=1, max_running_requests=2, **settings) as llm:
            for _ in range(2):
                assert check_hybrid(llm, asked[:2], wanted[:2]) == [0, 0]


def test_what_recurrent_layers_cannot_do_is_off(hybrid, caplog):
    folder, asked, wanted = hybrid
    off = {"enable_hierarchical_cache": True, "hicache_size_gib": 0.01}
    with caplog.at_level(logging.WARNING), LLM(str(folder), num_threads=1, **off) as llm:
        check_hybrid(llm, asked[:1], wanted[:1])
    assert "--enable-hierarchical-cache is off" in caplog.text


# ---- guessed tokens

REPEATING = ["Repeat: one two three four five six one two three four five six", "What is this?", "Name a colour."]


@pytest.fixture(scope="module")
def engines(default_model):
    knobs = {"model": default_model, "num_threads": 1, "max_total_tokens": 4096}
    none = {"speculative_num_draft_tokens": 0}
    guesses = {"speculative_algorithm": "ngram", "speculative_num_draft_tokens": 4}
    with LLM(**knobs, **none) as plain, LLM(**knobs, **guesses) as guessing:
        yield plain, guessing


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_answers_are_the_same_in_fewer_steps(engines, temperature):
    options = SamplingOverrides(temperature=temperature, seed=3, max_new_tokens=48, ignore_eos=True)
    found = []
    for llm in engines:
        before = llm.stats()
        guesses_before = before.steps.guesses
        answers = [llm.chat(text, options, num_logprobs=1) for text in REPEATING]
        found.append((answers, llm.stats().forward_steps_total - before.forward_steps_total, llm.stats()))
    (plain, steps, _), (guessed, fewer, stats) = found
    for one, other in zip(plain, guessed, strict=True):
        assert one.token_ids == other.token_ids
        assert [entry.logprob for entry in one.logprobs] == pytest.approx(
            [entry.logprob for entry in other.logprobs], abs=1e-4
        )
    assert reduce(Guesses.plus, [one.guesses for one in guessed]).plus(guesses_before) == stats.steps.guesses
    assert not any(one.guesses.steps for one in plain)
    assert stats.steps.guesses.right > 0
    if temperature == 0:
        assert fewer < steps


FORM = {
    "type": "object",
    "properties": {name: {"type": "string", "maxLength": 6} for name in ("main_subject", "background", "colour")},
    "required": ["main_subject", "background", "colour"],
}


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 40, "ignore_eos": True},
        {"max_tokens": 40, "ignore_eos": True, "presence_penalty": 0.8, "repetition_penalty": 1.2},
        {"max_tokens": 80, "structured_outputs": {"json": FORM}},
        {"max_tokens": 80, "structured_outputs": {"json": FORM}, "frequency_penalty": 0.4, "min_tokens": 20},
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_many_at_a_time_guess_too(engines, options, temperature):
    """Eight of them, and with what depends on all tokens before: penalties and grammars."""
    prompts = [f"{number}: {text}" for number, text in enumerate(3 * REPEATING)][:8]
    found = []
    for llm in engines:
        before = llm.stats()
        answers = llm.chat_batch(prompts, temperature=temperature, seed=5, **options)
        after = llm.stats()
        found.append([answer.token_ids for answer in answers])
        steps, before_steps = after.steps, before.steps
        right = steps.guesses.right - before_steps.guesses.right
    assert found[0] == found[1]
    assert right > 0


def test_answers_that_may_not_end_early_are_the_same(engines):
    options = SamplingOverrides(temperature=0, max_new_tokens=48, min_tokens=30)
    plain, guessed = ([llm.chat(text, options).token_ids for text in REPEATING] for llm in engines)
    assert plain == guessed
    assert min(map(len, plain)) >= 30
    assert min(len(engines[0].chat(text, SamplingOverrides(temperature=0)).token_ids) for text in REPEATING) < 30
