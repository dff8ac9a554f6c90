"""Engines of hybrid models: what is found of a prompt, and what of the settings does not go with recurrent layers."""

import logging

import pytest

from tests.tiny_checkpoints import HYBRID_MOE
from tests.vlmserve.reference import ask, assert_equal_answers, known, picture
from vlmserve import LLM, SamplingOverrides

NEW = 12
GREEDY = SamplingOverrides(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)
WORDS = "How many red circles are there on the left side of the blue square? " * 5


@pytest.fixture(scope="module", name="known")
def long_conversations(tmp_path_factory):
    """They begin alike."""
    asked = [
        ask(WORDS, picture(1, 256, 256)),
        ask(WORDS + "Count.", picture(1, 256, 256)),
        ask(WORDS[:150], picture(2, 160, 96)),
        ask(WORDS),
        ask(WORDS + WORDS),
    ]
    return known(HYBRID_MOE, tmp_path_factory.mktemp(HYBRID_MOE), asked, NEW)


def check(llm, asked, wanted):
    done = llm.chat_batch(asked, GREEDY, num_logprobs=2)
    for got, want in zip(done, wanted, strict=True):
        assert_equal_answers(got, want)
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
def test_prefixes_are_found_and_answers_stay(known, settings):
    folder, asked, wanted = known
    with LLM(str(folder), num_threads=1, **settings) as llm:
        check(llm, asked, wanted)
        again = check(llm, asked[::-1], wanted[::-1])[::-1]
        assert all(found % 64 == 0 for found in again)
        if "max_total_tokens" not in settings:
            assert all(found >= (want.prompt_tokens - 1) // 64 * 64 for found, want in zip(again, wanted, strict=True))


def test_a_turn_goes_on_behind_the_answer_before(known):
    folder, asked, _ = known
    long = SamplingOverrides(temperature=0.0, max_new_tokens=150, ignore_eos=True)
    with LLM(str(folder), num_threads=1, mamba_track_interval=64, page_size=16) as llm:
        first = llm.chat(asked[3], long)
        turns = [*asked[3], {"role": "assistant", "content": first.text}, {"role": "user", "content": "And then?"}]
        second = llm.chat(turns, GREEDY)
        assert second.cached_tokens % 64 == 0
        llm.flush_cache()
        assert llm.chat(turns, GREEDY).token_ids == second.token_ids


def test_without_room_for_snapshots_nothing_is_found(known):
    folder, asked, wanted = known
    for settings in ({"mamba_cache_mib": 0}, {"disable_radix_cache": True}):
        with LLM(str(folder), num_threads=1, max_running_requests=2, **settings) as llm:
            for _ in range(2):
                assert check(llm, asked[:2], wanted[:2]) == [0, 0]


def test_what_recurrent_layers_cannot_do_is_off(known, caplog):
    folder, asked, wanted = known
    off = {"speculative_algorithm": "ngram", "enable_hierarchical_cache": True, "hicache_size_gib": 0.01}
    with caplog.at_level(logging.WARNING), LLM(str(folder), num_threads=1, **off) as llm:
        check(llm, asked[:1], wanted[:1])
    assert "--speculative-algorithm ngram is off: qwen3_5_moe is recurrent" in caplog.text
    assert "--enable-hierarchical-cache is off" in caplog.text
