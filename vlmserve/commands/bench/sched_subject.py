"""A scheduler without a model: a worker that answers at once, and thousands of requests."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from vision.cache.embedding_cache import EmbeddingCache, MemoryTier
from vision.encoder_pool import EmbedShape, EncoderPool, PoolLimits
from vision.towers.temporal_patch import EncodeBatch
from vision.workers.backend import EncodeResult
from vlmserve.config.engine_args import EngineArgs
from vlmserve.engine.loop import EventLoop
from vlmserve.engine.step import OneGroup
from vlmserve.executor.device_queue import DeviceQueue
from vlmserve.executor.model_worker_batch import ModelWorkerBatch, ModelWorkerResult, SamplingBatchInfo
from vlmserve.ipc.messages import SamplingParams, SchedulerOutput, TokenizedGenerateReqInput
from vlmserve.memory.allocator import TokenToKVPoolAllocator
from vlmserve.memory.media_keys import MediaKeyTable
from vlmserve.memory.radix_cache import RadixCache
from vlmserve.memory.req_to_token import ReqPoolAllocator
from vlmserve.scheduler.estimates import NewTokenRatio
from vlmserve.scheduler.kv_cache_manager import KVCacheManager, Sessions
from vlmserve.scheduler.policy import make_policy
from vlmserve.scheduler.scheduler import Scheduler

T = TypeVar("T")

PROMPT_TOKENS = 256
SHARED_TOKENS = 128
_MOST_NEW = 512
_VOCABULARY = 50_000


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerLoad:
    """Requests that run and wait. clients: how many send them. depth: steps in flight."""

    running: int = 256
    waiting: int = 10_000
    policy: str = "fcfs"
    page: int = 16
    depth: int = 1
    clients: int = 4


class _NoEncoder:
    """An encoder backend for text alone."""

    has_work = False

    def workers(self) -> tuple[int, ...]:
        return (0,)

    def start(self, worker: int, batch: EncodeBatch) -> None:
        raise AssertionError("there is nothing to encode")

    def cancel(self, worker: int, number: int) -> None:
        raise AssertionError("there is nothing to encode")

    def collect(self) -> list[EncodeResult]:
        return []

    def wait_handles(self) -> tuple[int, ...]:
        return ()

    def work(self, budget_s: float) -> bool:
        return False

    def close(self) -> None:
        pass


class InstantWorker:
    """A worker that answers every step at once with token 1. seconds: the CPU time that it took of this thread."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def forward(self, batch: ModelWorkerBatch) -> ModelWorkerBatch:
        """Return the batch: nothing is computed."""
        return batch

    def sample(self, forwarded: ModelWorkerBatch, info: SamplingBatchInfo) -> ModelWorkerResult:
        """Return a token for each request that gets one."""
        before = time.thread_time()
        count = len(info.batch_indices)
        result = ModelWorkerResult(
            step=forwarded.step,
            compute_s=0.01,
            next_token_ids=np.ones(count, dtype=np.int64),
            logprobs=np.full(count, np.nan, dtype=np.float32),
            top_ids=np.zeros((count, 0), dtype=np.int64),
            top_logprobs=np.zeros((count, 0), dtype=np.float32),
        )
        self.seconds += time.thread_time() - before
        return result


class _InstantQueue(DeviceQueue):
    """A queue of `depth` steps in flight, each done when it is launched."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.least_reqs = 0


class SchedulerSubject:
    """A scheduler whose load is kept up: for each request that ends, another one comes.

    Answers have 64 to 512 tokens, so that some end in most steps. Prompts have 256 tokens, and half of them are
    common to prompts of the same client.
    """

    def __init__(self, load: SchedulerLoad) -> None:
        rng = np.random.default_rng(0)
        self.load = load
        self._rng = rng
        self._stems = [rng.integers(0, _VOCABULARY, SHARED_TOKENS) for _ in range(4 * load.clients)]
        self._came = 0
        context = PROMPT_TOKENS + _MOST_NEW + load.page
        size = load.running * context // load.page * load.page * 2
        allocator = TokenToKVPoolAllocator(size, load.page)
        self.kv = KVCacheManager(allocator, RadixCache(allocator), ReqPoolAllocator(load.running, context))
        self.worker = InstantWorker()
        device: DeviceQueue = _InstantQueue(load.depth)
        self.ended = 0
        encoder = _no_encoder()
        self.scheduler = Scheduler(
            EngineArgs(
                model="none",
                max_running_requests=load.running,
                max_queued_requests=2 * load.waiting + 2 * load.running,
                page_size=load.page,
                schedule_policy=load.policy,  # type: ignore[arg-type]
                max_decode_slowdown=0,
                max_step_s=0,
            ),
            max_req_len=PROMPT_TOKENS + _MOST_NEW,
            eos_token_ids=frozenset({0}),
            kv=self.kv,
            encoder=encoder,
            sessions=Sessions(self.kv.prefix_cache, max_sessions=0, timeout_s=1, clock=time.monotonic),
            policy=make_policy(load.policy, match=self.kv.matched_len, path=self.kv.matched_path),
            new_token_ratio=NewTokenRatio(1.0),
            media_keys=MediaKeyTable(),
            send=self._take,
        )
        self.loop = EventLoop(
            [self.scheduler],
            worker=OneGroup(self.worker),
            device=device,
            encoder=encoder,
            send=self._take,
            max_patches=0,
        )
        for _ in range(load.running + load.waiting):
            self._come()
        while len(self.scheduler.running_batch) < load.running:
            self.loop.step()

    def _come(self) -> None:
        own = self._rng.integers(0, _VOCABULARY, PROMPT_TOKENS - SHARED_TOKENS)
        stem = self._stems[int(self._rng.integers(len(self._stems)))]
        message = TokenizedGenerateReqInput(
            rid=f"r{self._came}",
            input_ids=np.concatenate([stem, own]),
            sampling_params=SamplingParams(max_new_tokens=int(self._rng.integers(64, _MOST_NEW)), seed=self._came),
            client=f"client {self._came % self.load.clients}",
        )
        self._came += 1
        self.loop.handle(message)

    def _take(self, output: SchedulerOutput) -> None:
        self.ended += sum(one.finish_reason is not None for one in getattr(output, "outputs", ()))

    def turns(self, count: int) -> list[float]:
        """Run `count` turns of the loop, and return the CPU seconds of this thread for each, without the worker's."""
        found = []
        for _ in range(count):
            while self.ended:
                self.ended -= 1
                self._come()
            self.worker.seconds = 0.0
            before = time.thread_time()
            self.loop.step()
            found.append(time.thread_time() - before - self.worker.seconds)
        return found


def _no_encoder() -> EncoderPool:
    return EncoderPool(
        _NoEncoder(),
        EmbeddingCache(MemoryTier(0, torch.device("cpu"))),
        fingerprint=b"none",
        embed_shape=EmbedShape(merge=1, width=1, dtype=torch.float32),
        limits=PoolLimits(max_patches=1, space_bytes=0),
    )


def cpu_seconds(run: Callable[[], T]) -> tuple[float, T]:
    """Return the CPU seconds of this thread for a call, and its result. The garbage collector is off meanwhile."""
    gc.disable()
    try:
        before = time.thread_time()
        result = run()
        return time.thread_time() - before, result
    finally:
        gc.enable()
