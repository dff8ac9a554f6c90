"""Thousands of requests of all kinds, some given up on the way: each is answered, nothing is lost, nothing grows."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.gpu.test_answers import engine
from tests.tiny_checkpoints import make_checkpoint
from tests.vlmserve.reference import conversations
from vlmserve import LLM
from vlmserve.engine.build import build_loop
from vlmserve.frontend.request_builder import ChatPrompt, GenerateReqInput
from vlmserve.ipc.messages import AbortReq, SamplingParams, SchedulerOutput, TokenizedGenerateReqInput

TOGETHER = 48
REQUESTS = {"cuda": 2000, "cpu": 120}
GROWTH = 4 << 20  # bytes: of torch's own bookkeeping


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3_vl", tmp_path_factory.mktemp("tiny"))


def kinds(random: np.random.Generator) -> Iterator[SamplingParams]:
    """Greedy, sampled in all ways, with penalties and biases; short and long."""
    while True:
        tokens = int(random.integers(1, 40))
        yield SamplingParams(max_new_tokens=tokens, temperature=0.0, ignore_eos=True)
        yield SamplingParams(max_new_tokens=tokens, seed=int(random.integers(1000)))
        yield SamplingParams(max_new_tokens=tokens, top_p=0.8, top_k=20, min_p=0.05, seed=int(random.integers(1000)))
        yield SamplingParams(
            max_new_tokens=tokens, temperature=0.7, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2
        )
        yield SamplingParams(max_new_tokens=tokens, temperature=0.0, logit_bias={40: 2.0, 41: -5.0}, min_tokens=tokens)


class Load:
    """Keeps so many requests in the engine; a part of them is given up, at any time."""

    def __init__(self, llm: LLM, seed: int) -> None:
        engine = llm.engine
        self.loop = build_loop(engine.args, engine.runner, engine.info, self._take)
        self.random = np.random.default_rng(seed)
        self.prompts = [self._tokenized(llm, messages) for messages in conversations()]
        self.sampling = kinds(self.random)
        self.reasons: Counter[str] = Counter()
        self.greedy: dict[tuple[int, int], set[tuple[int, ...]]] = {}
        self.open: dict[str, tuple[int, int, list[int], bool]] = {}
        self.came = 0

    def run(self, requests: int) -> None:
        """Until so many more have come and all have ended."""
        last = self.came + requests
        while self.came < last or not self.loop.is_idle():
            while self.came < last and len(self.open) < TOGETHER:
                self._come()
            if self.open and self.random.random() < 0.05:
                self.loop.handle(AbortReq(rid=self.random.choice(list(self.open))))
            self.loop.step_or_wait()
        self.loop.step()  # checks the pools

    def _come(self) -> None:
        kind = int(self.random.integers(len(self.prompts)))
        sampling = next(self.sampling)
        rid = f"r{self.came}"
        plain = sampling.temperature == 0 and not sampling.logit_bias
        self.open[rid] = (kind, sampling.max_new_tokens or 0, [], plain)
        self.came += 1
        logprobs = int(self.random.integers(4)) if self.random.random() < 0.2 else None
        prompt = self.prompts[kind]
        self.loop.handle(
            dataclasses.replace(prompt, rid=rid, group=rid, sampling_params=sampling, num_logprobs=logprobs)
        )

    def _take(self, output: SchedulerOutput) -> None:
        for one in output.outputs:
            kind, tokens, so_far, plain = self.open[one.rid]
            so_far.extend(one.token_ids)
            if one.finish_reason is not None:
                self.reasons[one.finish_reason.type] += 1
                del self.open[one.rid]
                if plain and one.finish_reason.type == "length":
                    assert len(so_far) == tokens
                    self.greedy.setdefault((kind, tokens), set()).add(tuple(so_far))

    @staticmethod
    def _tokenized(llm: LLM, messages: list) -> TokenizedGenerateReqInput:
        [made], _, _ = llm._build(GenerateReqInput(request_id="", prompt=ChatPrompt(messages=messages)))
        return made


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_total_tokens": 2048, "page_size": 4, "schedule_conservativeness": 0.2, "chunked_prefill_size": 64}],
    ids=["roomy", "tight"],
)
def test_all_are_answered_and_nothing_is_left(tiny, device, settings):
    requests = REQUESTS[device.type] // 2
    with engine(tiny, device, dtype="float32", max_running_requests=TOGETHER, **settings) as llm:
        load = Load(llm, seed=len(settings))
        load.run(requests // 2)
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        load.run(requests - requests // 2)
        after = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        assert load.open == {}
        assert sum(load.reasons.values()) == requests
        assert set(load.reasons) <= {"length", "stop", "abort"}
        assert load.reasons["abort"] > 0
        stats = llm.stats()
        assert stats.kv_free_tokens + stats.kv_cached_tokens == stats.kv_total_tokens
        assert stats.kv_locked_tokens == 0
        assert stats.req_pool_free == stats.req_pool_total
        assert after - before < GROWTH
        # the same question has the same answer, whoever was computed beside it
        assert all(len(answers) == 1 for answers in load.greedy.values())
        starts: dict[int, set[tuple[int, ...]]] = {}
        for (kind, _), answers in load.greedy.items():
            starts.setdefault(kind, set()).update(answer[:1] for answer in answers)
        assert all(len(first) == 1 for first in starts.values())
