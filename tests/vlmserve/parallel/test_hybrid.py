"""Two processes that share a hybrid model, its recurrent states included, answer as one that has all of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.tiny_checkpoints import HYBRID, HYBRID_MOE, STREAMED, make_checkpoint
from tests.vlmserve.parallel.sharing import assert_alike
from tests.vlmserve.reference import ask, picture
from vlmserve import LLM, SamplingOverrides

WORDS = "How many red circles are there on the left side of the blue square? " * 5
# an end may come at any time, as far as anybody knows
GREEDY = SamplingOverrides(temperature=0.0, max_new_tokens=50)
# Prompts go in chunks, and there is not room for all of them to end: some are taken back
SETTINGS = {
    "num_threads": 1,
    "page_size": 16,
    "chunked_prefill_size": 112,
    "mamba_track_interval": 64,
    "max_total_tokens": 288,
    "schedule_conservativeness": 0.01,
    "max_step_s": 0.0,  # chunks do not follow measured time
    "max_decode_slowdown": 0.0,
}


SLOW = [pytest.param(family, marks=pytest.mark.slow) for family in (HYBRID_MOE, STREAMED)]


@pytest.mark.parametrize("family", [HYBRID, *SLOW])
def test_the_same_answers_as_alone(family: str, tmp_path: Path):
    """Chunks of prompts, pictures, prefixes that are found, requests that are taken back, steps in flight."""
    folder = make_checkpoint(family, tmp_path)
    asked = [
        ask(WORDS, picture(1, 256, 256)),
        ask(WORDS + "Count.", picture(1, 256, 256)),
        *(ask(WORDS[: 8 + seed]) for seed in range(6)),
    ]
    answers, states = [], []
    for size in (1, 2):
        with LLM(str(folder), tp_size=size, **SETTINGS) as llm:
            together = llm.chat_batch(asked, GREEDY, num_logprobs=2)
            assert llm.stats().retracted_total
            again = llm.chat_batch(asked[:2], replace(GREEDY, max_new_tokens=16), num_logprobs=2)
            assert sum(one.cached_tokens for one in again) > sum(one.cached_tokens for one in together[:2])
            answers.append([*together, *again])
            assert llm.engine.loop.schedulers[0].kv.states.held == 0
            cache = llm._runner.recurrent_cache
            states.append((cache.conv.shape, cache.recurrent.shape, llm._runner.model.config.num_kv_layers))
            if size == 2:
                group, layers = llm.engine.ranks.group, len(llm._runner.model.language_model.layers)
                tables = 2 if family == STREAMED else 0
                assert group.counts["all_reduce"] == llm.stats().forward_steps_total * (2 * layers + 1 + tables)
    assert_alike(*answers)
    (conv, recurrent, _), (own_conv, own_recurrent, _) = states
    assert own_conv[-1] == conv[-1] / 2
    assert own_recurrent[2] == recurrent[2] / 2
