"""Guessed tokens through the whole engine: the same answers in fewer steps."""

from __future__ import annotations

import pytest

from vlmserve import LLM, SamplingOverrides

PROMPTS = ["Repeat: one two three four five six one two three four five six", "What is this?", "Name a colour."]


@pytest.fixture(scope="module")
def engines(default_model):
    knobs = {"model": default_model, "num_threads": 1, "max_total_tokens": 4096}
    with LLM(**knobs) as plain, LLM(**knobs, speculative_algorithm="ngram") as guessing:
        yield plain, guessing


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_answers_are_the_same_in_fewer_steps(engines, temperature):
    options = SamplingOverrides(temperature=temperature, seed=3, max_new_tokens=48, ignore_eos=True)
    found = []
    for llm in engines:
        before = llm.stats()
        answers = [llm.chat(text, options, num_logprobs=1) for text in PROMPTS]
        found.append((answers, llm.stats().forward_steps_total - before.forward_steps_total, llm.stats()))
    (plain, steps, _), (guessed, fewer, stats) = found
    for one, other in zip(plain, guessed, strict=True):
        assert one.token_ids == other.token_ids
        assert [entry.logprob for entry in one.logprobs] == pytest.approx(
            [entry.logprob for entry in other.logprobs], abs=1e-4
        )
    assert stats.steps.accepted_tokens_total > 0
    if temperature == 0:
        assert fewer < steps


def test_answers_that_may_not_end_early_are_the_same(engines):
    options = SamplingOverrides(temperature=0, max_new_tokens=48, min_tokens=30)
    plain, guessed = ([llm.chat(text, options).token_ids for text in PROMPTS] for llm in engines)
    assert plain == guessed
    assert min(map(len, plain)) >= 30
    assert min(len(engines[0].chat(text, SamplingOverrides(temperature=0)).token_ids) for text in PROMPTS) < 30
