"""Thousands of requests of all kinds, some given up on the way: each is answered, nothing is lost, nothing grows."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.tiny_checkpoints import make_checkpoint
from tests.vlmserve.reference import conversations
from vlmserve import SamplingOverrides
from vlmserve.commands.offline.async_llm import AsyncLLM
from vlmserve.commands.offline.inputs import read_settings
from vlmserve.frontend.request_builder import ChatPrompt, GenerateReqInput

TOGETHER = 48
REQUESTS = {"cuda": 2000, "cpu": 120}
GROWTH = 4 << 20  # bytes: of torch's own bookkeeping
GREEDY = {"temperature": 0.0, "ignore_eos": True}
KINDS = (
    GREEDY,
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.8, "top_k": 20, "min_p": 0.05},
    {"temperature": 0.7, "presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    {"temperature": 0.0, "logit_bias": {40: 2.0, 41: -5.0}, "min_tokens": 1},
)


@dataclass(frozen=True)
class Ended:
    """What became of a request: the number of its conversation, its sampling, its tokens, and why it ended."""

    conversation: int
    sampling: SamplingOverrides
    token_ids: tuple[int, ...]
    reason: str


@asynccontextmanager
async def async_engine(folder: Path, device: torch.device, **settings: object) -> AsyncIterator[AsyncLLM]:
    """Start an engine that takes up to a thousand requests at a time."""
    args, limits = read_settings(folder, None, {"device": str(device), "num_threads": 1} | settings)
    llm = AsyncLLM(args, limits, joined=False, max_pending=1000)
    try:
        yield llm
    finally:
        await asyncio.to_thread(llm.close)


async def some_at_a_time(most: int, calls: Iterable[Callable[[], Awaitable[Ended]]]) -> list[Ended]:
    """Make calls in order, up to `most` of them at a time; return their results in the same order."""
    turns = asyncio.Semaphore(most)

    async def call(one: Callable[[], Awaitable[Ended]]) -> Ended:
        async with turns:
            return await one()

    return list(await asyncio.gather(*map(call, calls)))


async def ask(
    llm: AsyncLLM, name: str, conversation: int, sampling: SamplingOverrides, logprobs: int | None, give_up: int | None
) -> Ended:
    """Ask one question; with `give_up`, leave after so many outputs."""
    prompt = ChatPrompt(messages=conversations()[conversation])
    request = GenerateReqInput(request_id=name, prompt=prompt, sampling=sampling, num_logprobs=logprobs)
    tokens: list[int] = []
    async with aclosing(llm.generate(request)) as outputs:
        number = 0
        async for choice in outputs:
            number += 1
            tokens += choice.output.token_ids
            if choice.output.finish_reason is not None:
                return Ended(conversation, sampling, tuple(tokens), choice.output.finish_reason.type)
            if number == give_up:
                break
    return Ended(conversation, sampling, tuple(tokens), "abort")


def questions(llm: AsyncLLM, random: np.random.Generator, count: int) -> Iterator[partial]:
    """Make short and long requests of all kinds; one of ten is given up after some of its tokens."""
    for number, kind in zip(range(count), cycle(KINDS), strict=False):
        sampling = SamplingOverrides(
            max_new_tokens=int(random.integers(1, 40)), seed=int(random.integers(1000)), **kind
        )
        logprobs = int(random.integers(4)) if random.random() < 0.2 else None
        give_up = int(random.integers(1, 10)) if random.random() < 0.1 else None
        conversation = int(random.integers(len(conversations())))
        yield partial(ask, llm, f"r{random.integers(2**60)}-{number}", conversation, sampling, logprobs, give_up)


async def load(folder: Path, device: torch.device, settings: dict[str, object]) -> list[Ended]:
    """Ask many questions, twice, and check what is left in the engine."""
    random = np.random.default_rng(len(settings))
    half = REQUESTS[device.type] // 4
    limits = {"dtype": "float32", "max_total_tokens": 8192, "max_running_requests": TOGETHER}
    async with async_engine(folder, device, **limits | settings) as llm:
        ended = await some_at_a_time(TOGETHER, questions(llm, random, half))
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        ended += await some_at_a_time(TOGETHER, questions(llm, random, half))
        for _ in range(100):  # requests given up last may still be on their way out
            stats = await llm.stats()
            if stats.kv_locked_tokens == 0 and stats.req_pool_free == stats.req_pool_total:
                break
        after = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    assert stats.kv_free_tokens + stats.kv_cached_tokens == stats.kv_total_tokens
    assert stats.kv_locked_tokens == 0
    assert stats.req_pool_free == stats.req_pool_total
    assert after - before < GROWTH
    return ended


@pytest.mark.parametrize(
    "settings",
    [{}, {"max_total_tokens": 2048, "page_size": 4, "schedule_conservativeness": 0.2, "chunked_prefill_size": 64}],
    ids=["roomy", "tight"],
)
def test_all_are_answered_and_nothing_is_left(tmp_path, device, settings):
    folder = make_checkpoint("qwen3_vl", tmp_path)
    ended = asyncio.run(load(folder, device, settings))
    assert len(ended) == REQUESTS[device.type] // 2
    reasons = Counter(one.reason for one in ended)
    assert {"length", "abort"} <= set(reasons) <= {"length", "abort", "stop"}
    # the same question has the same answer, whoever was computed beside it
    longest: dict[int, tuple[int, ...]] = {}
    for one in sorted(ended, key=lambda one: -len(one.token_ids)):
        if one.sampling.temperature == 0 and one.sampling.logit_bias is None:
            assert one.reason == "abort" or len(one.token_ids) == one.sampling.max_new_tokens
            assert longest.setdefault(one.conversation, one.token_ids)[: len(one.token_ids)] == one.token_ids
