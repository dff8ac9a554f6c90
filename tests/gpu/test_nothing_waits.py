"""Steps in flight on a real GPU: nothing but the event behind a step is waited for."""

from __future__ import annotations

import pytest

from tests.gpu.test_answers import engine
from tests.sync_debug import nothing_waits
from tests.vlmserve.reference import conversations
from vlmserve import SamplingOverrides

WAYS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "top_p": 0.8, "top_k": 20, "min_p": 0.01, "seed": 7},
    "penalised": {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
}


@pytest.mark.parametrize("way", WAYS)
def test_steps_wait_for_nothing(folder, cuda, way):
    asked = conversations()[:6]
    sampling = SamplingOverrides(max_new_tokens=12, ignore_eos=True, **WAYS[way])
    with engine(folder, cuda, dtype="float32") as llm:
        first = llm.chat_batch(asked, sampling, num_logprobs=2)  # builds kernels, and fills torch's allocators
        llm.flush_cache()
        with nothing_waits():
            again = llm.chat_batch(asked, sampling, num_logprobs=2)
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in first]
