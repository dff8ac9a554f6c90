"""Penalties of tokens that are in flight: the answers of one step at a time, whatever is launched ahead."""

from __future__ import annotations

import numpy as np
import pytest

from tests import hf_env  # noqa: F401
from tests.tiny_checkpoints import make_checkpoint
from tests.vlmserve.reference import conversations
from tests.vlmserve.scheduler.lazy_queue import LazyQueue
from vlmserve import LLM, SamplingOverrides
from vlmserve.engine.step import OneGroup
from vlmserve.executor.device_queue import DeviceQueue

NEW = 16
WAYS = {
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.5},
    "counts": {"temperature": 0.0, "frequency_penalty": 1.1, "presence_penalty": 0.7},
    "all, sampled": {
        "temperature": 1.0,
        "seed": 11,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.4,
        "presence_penalty": 0.3,
        "logit_bias": {5: 3.0},
        "min_tokens": 4,
    },
}


class Ahead:
    """Notes how many tokens of one request were in flight, at most, in each step."""

    def __init__(self, worker) -> None:
        self.worker = worker
        self.forward = worker.forward
        self.in_flight: list[int] = []

    def sample(self, forwarded, info):
        self.in_flight.append(max(np.bincount(info.in_flight_rows), default=0))
        return self.worker.sample(forwarded, info)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = make_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("model"))
    settings = {"max_step_s": 0.0, "max_decode_slowdown": 0.0}  # what shares a step does not follow measured time
    with LLM(str(folder), num_threads=1, max_total_tokens=4096, **settings) as made:
        yield made


@pytest.mark.parametrize("way", WAYS)
def test_answers_do_not_depend_on_steps_in_flight(llm, way):
    loop, worker = llm.engine.loop, llm._runner
    answers = []
    for device in (DeviceQueue(), LazyQueue(2), LazyQueue(3)):
        device.least_reqs = 0  # requests come one by one, as pictures get ready: each runs ahead at once
        loop.device.close()
        ahead = Ahead(worker)
        loop.device, loop.worker = device, OneGroup(ahead)
        llm.flush_cache()
        sampling = SamplingOverrides(max_new_tokens=NEW, ignore_eos=True, **WAYS[way])
        answers.append([answer.token_ids for answer in llm.chat_batch(conversations()[:4], sampling)])
        assert max(ahead.in_flight) == device.depth - 1, "as many tokens of a request as there are steps ahead"
    assert answers[1] == answers[0]
    assert answers[2] == answers[0]
    assert any(len(set(ids)) > 2 for ids in answers[0]), "there is something to penalise"
