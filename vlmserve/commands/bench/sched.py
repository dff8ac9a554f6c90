"""`vlmserve bench sched`: the cost of the scheduler itself, without a model.

A worker answers at once, and thousands of requests run and wait. A turn is the loop's work between two steps of the
model: deciding, the message, the sampling info, and taking the result; sending does not count. Only the CPU time of its
thread counts, so other work on the machine matters little.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

import numpy as np
import torch

from vision.cache.embedding_cache import EmbeddingCache, MemoryTier
from vision.encoder_pool import EmbedShape, EncoderPool, PoolLimits
from vision.towers.runner import TowerRunner
from vision.workers.inline import InlineBackend
from vlmserve.commands.bench.figures import Measure, bench_parser, milliseconds, show_and_write
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
from vlmserve.scheduler.kv_cache_manager import KVCacheManager
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
        self.load = load
        self._rng = np.random.default_rng(0)
        self._stems = [self._rng.integers(0, _VOCABULARY, SHARED_TOKENS) for _ in range(4 * load.clients)]
        self._came = 0
        context = PROMPT_TOKENS + _MOST_NEW + load.page
        size = load.running * context // load.page * load.page * 2
        allocator = TokenToKVPoolAllocator(size, load.page)
        self.kv = KVCacheManager(allocator, RadixCache(allocator), ReqPoolAllocator(load.running, context))
        self.worker = InstantWorker()
        self.ended = 0
        # of text alone: nothing is ever encoded
        encoder = EncoderPool(
            InlineBackend(cast(TowerRunner, None)),
            EmbeddingCache(MemoryTier(0, torch.device("cpu"))),
            fingerprint=b"none",
            embed_shape=EmbedShape(merge=1, width=1, dtype=torch.float32),
            limits=PoolLimits(max_patches=1, space_bytes=0),
        )
        self.scheduler = Scheduler(
            EngineArgs(
                model="none",
                max_running_requests=load.running,
                max_queued_requests=2 * load.waiting + 2 * load.running,
                page_size=load.page,
                schedule_policy=load.policy,  # type: ignore[arg-type]
                max_decode_slowdown=0,
                max_step_s=0,
                max_sessions=0,
            ),
            max_req_len=PROMPT_TOKENS + _MOST_NEW,
            eos_token_ids=frozenset({0}),
            kv=self.kv,
            encoder=encoder,
            media_keys=MediaKeyTable(),
            send=self._take,
        )
        self.loop = EventLoop(
            [self.scheduler],
            worker=OneGroup(self.worker),
            device=_InstantQueue(load.depth),
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


def cpu_seconds(run: Callable[[], T]) -> tuple[float, T]:
    """Return the CPU seconds of this thread for a call, and its result. The garbage collector is off meanwhile."""
    gc.disable()
    try:
        before = time.thread_time()
        result = run()
        return time.thread_time() - before, result
    finally:
        gc.enable()


_TARGETS_MS = {"fcfs": 2.0, "lpm": 5.0}
_LONG_PROMPT = 32 * 1024
_RADIX_TARGET_MS = 1.0


def main(argv: Sequence[str]) -> int:
    """Measure the parts asked for, and print a line for each figure."""
    about = "CPU time of the scheduler, without a model: a turn of its loop, and its prefix cache."
    parser = bench_parser("sched", about, rounds=5, parts=_PARTS)
    add = parser.add_argument
    add("--running", type=int, default=256, help="requests that run at a time")
    add("--waiting", type=int, default=10_000, help="requests that wait")
    add("--clients", type=int, default=4, help="clients that send them")
    add("--turns", type=int, default=400, help="turns of a round")
    args = parser.parse_args(argv)
    print(f"CPU time of the scheduler's thread; {args.rounds} rounds of {args.turns} turns; median (least to most)")
    show_and_write(args, {part: _PARTS[part](args) for part in args.parts})
    return 0


def _policies(args: argparse.Namespace) -> Iterator[Measure]:
    about = "a turn with all places taken and many waiting"
    for policy in ("fcfs", "lpm", "dfs-weight", "lof"):
        for page in (16, 1):
            for depth in (1, 2):
                load = SchedulerLoad(
                    running=args.running,
                    waiting=args.waiting,
                    clients=args.clients,
                    policy=policy,
                    page=page,
                    depth=depth,
                )
                subject = SchedulerSubject(load)
                subject.turns(args.turns // 4)
                seconds = [subject.turns(args.turns) for _ in range(args.rounds)]
                name = f"{policy}, page size {page}, {depth} in flight"
                yield milliseconds(name, seconds, _TARGETS_MS.get(policy), about)


def _radix(args: argparse.Namespace) -> Iterator[Measure]:
    """Prompts of 32k tokens share their first half. Each is inserted in 16 chunks, as a prompt is computed."""
    for page in (16, 1):
        found = [_radix_round(page, max(args.turns // 20, 4), seed=number) for number in range(args.rounds)]
        for name, each in zip(("match", "insert"), zip(*found, strict=True), strict=True):
            name = f"{name} of {_LONG_PROMPT} tokens, page size {page}"
            yield milliseconds(name, each, _RADIX_TARGET_MS, "a long prompt in the prefix cache, in 17 nodes")


def _radix_round(page: int, count: int, *, seed: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each match and of each insertion."""
    rng = np.random.default_rng(seed)
    allocator = TokenToKVPoolAllocator(_LONG_PROMPT * (count + 1), page)
    cache = RadixCache(allocator)
    half = rng.integers(0, 50_000, _LONG_PROMPT // 2)
    match, insert = [], []
    for _ in range(count):
        key = np.concatenate([half, rng.integers(0, 50_000, _LONG_PROMPT // 2)])
        slots = allocator.alloc_extend(0, _LONG_PROMPT, -1)
        assert slots is not None
        for end in range(_LONG_PROMPT // 16, _LONG_PROMPT, _LONG_PROMPT // 16):
            cache.insert(key[:end], slots[:end])
        taken, _ = cpu_seconds(partial(cache.insert, key, slots))
        insert.append(taken)
        taken, found = cpu_seconds(partial(cache.match_prefix, key))
        match.append(taken)
        assert len(found.indices) == _LONG_PROMPT
    return match, insert


_PARTS = {"policies": _policies, "radix": _radix}
