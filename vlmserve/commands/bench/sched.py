"""`vlmserve bench sched`: the cost of the scheduler itself, without a model.

A turn is the loop's work between two steps of the model: deciding, the message, the sampling info, and taking the
result; sending does not count. Only the CPU time of its thread counts, so other work on the machine matters little.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from vlmserve.commands.bench.figures import Measure, bench_parser, milliseconds, show_and_write
from vlmserve.commands.bench.sched_subject import SchedulerLoad, SchedulerSubject, cpu_seconds
from vlmserve.memory.allocator import TokenToKVPoolAllocator
from vlmserve.memory.radix_cache import RadixCache

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
