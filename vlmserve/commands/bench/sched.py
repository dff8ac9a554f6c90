"""`vlmserve bench sched`: what the scheduler itself costs, without a model.

A turn of its loop is all that its thread does between two steps of the model: deciding, building the message, how
tokens are sampled, and taking the result; sending it excepted. CPU time of that thread, so other work on the machine
matters little.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

from vlmserve.commands.bench.interleaved import Spread
from vlmserve.commands.bench.sched_subject import Load, Subject, cpu_seconds
from vlmserve.config.flags import CommandParser
from vlmserve.memory.allocator import TokenToKVPoolAllocator
from vlmserve.memory.radix_cache import RadixCache

_TURNS, _QUICK_TURNS = 400, 40
_ROUNDS, _QUICK_ROUNDS = 5, 2
_TARGETS_MS = {"fcfs": 2.0, "lpm": 5.0}
_LONG_PROMPT = 32 * 1024
_RADIX_TARGET_MS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """Milliseconds: the median of a round, over rounds, and the 95th percentile of all. target_ms: of the median."""

    name: str
    spread: Spread
    p95_ms: float
    target_ms: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        return None if self.target_ms is None else self.spread.median <= self.target_ms

    def __str__(self) -> str:
        aim = "" if self.target_ms is None else f"; target: {self.target_ms:g} ms, {'met' if self.met else 'missed'}"
        return f"  {self.name:<44} {self.spread.shown('.3f', ' ms')}, p95 {self.p95_ms:.3f}{aim}"


def main(argv: Sequence[str]) -> int:
    """Measure the parts asked for; prints a line a figure, and with --json writes them all."""
    args = _parser().parse_args(argv)
    turns = args.turns or (_QUICK_TURNS if args.quick else _TURNS)
    rounds = args.rounds or (_QUICK_ROUNDS if args.quick else _ROUNDS)
    print(f"CPU time of the scheduler's thread; {rounds} rounds of {turns} turns; median (least to most of the rounds)")
    found: dict[str, list[Figure]] = {}
    for part in args.parts:
        title, measure = _PARTS[part]
        print(f"\n{part}: {title}", flush=True)
        found[part] = []
        for figure in measure(args.running, args.waiting, turns, rounds):
            found[part].append(figure)
            print(figure, flush=True)
    if args.json:
        plain = {part: [asdict(one) | {"met": one.met} for one in figures] for part, figures in found.items()}
        args.json.write_text(json.dumps(plain, indent=2) + "\n")
    return 0


def _turns(name: str, load: Load, turns: int, rounds: int, target_ms: float | None = None) -> Figure:
    subject = Subject(load)
    subject.turns(turns // 4)
    each = [subject.turns(turns) for _ in range(rounds)]
    medians = [1000 * statistics.median(one) for one in each]
    p95 = 1000 * float(np.percentile(np.concatenate(each), 95))
    return Figure(name=name, spread=Spread.of(medians), p95_ms=p95, target_ms=target_ms)


def _policies(running: int, waiting: int, turns: int, rounds: int) -> Iterator[Figure]:
    for policy in ("fcfs", "lpm", "dfs-weight", "lof"):
        for page in (16, 1):
            for depth in (1, 2):
                load = Load(running=running, waiting=waiting, policy=policy, page=page, depth=depth)
                name = f"{policy}, page size {page}, {depth} in flight"
                yield _turns(name, load, turns, rounds, _TARGETS_MS.get(policy))


def _queues(running: int, waiting: int, turns: int, rounds: int) -> Iterator[Figure]:
    for policy in ("fcfs", "lpm"):
        for length in (10, 100, 1000, 10_000):
            load = Load(running=running, waiting=length, policy=policy)
            yield _turns(f"{policy}, {length} waiting", load, turns, rounds)
    yield _turns("fcfs, of 1000 clients", Load(running=running, waiting=waiting, clients=1000), turns, rounds)
    load = Load(running=running, waiting=waiting, clients=1000, policy="lpm")
    yield _turns("lpm, of 1000 clients", load, turns, rounds)


def _running(running: int, waiting: int, turns: int, rounds: int) -> Iterator[Figure]:
    for count in (16, 32, 64, 128, 256):
        yield _turns(f"{count} running", Load(running=count, waiting=waiting), turns, rounds)


def _radix(running: int, waiting: int, turns: int, rounds: int) -> Iterator[Figure]:
    """Prompts of 32k tokens that share their first half, each in 16 chunks as a prompt is computed."""
    for page in (16, 1):
        match: list[list[float]] = []
        insert: list[list[float]] = []
        for number in range(rounds):
            found = _radix_round(page, max(turns // 20, 4), seed=number)
            match.append(found[0])
            insert.append(found[1])
        for name, each in (("match", match), ("insert", insert)):
            yield Figure(
                name=f"{name} of {_LONG_PROMPT} tokens, page size {page}",
                spread=Spread.of([1000 * statistics.median(one) for one in each]),
                p95_ms=1000 * float(np.percentile(np.concatenate(each), 95)),
                target_ms=_RADIX_TARGET_MS,
            )


def _radix_round(page: int, count: int, *, seed: int) -> tuple[list[float], list[float]]:
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


_PARTS = {
    "policies": ("a turn with all places taken and many waiting", _policies),
    "queues": ("a turn, by how many wait: flat", _queues),
    "running": ("a turn, by how many run: linear at worst", _running),
    "radix": ("a long prompt in the prefix cache, in 17 nodes", _radix),
}


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="vlmserve bench sched",
        description="CPU time of the scheduler, without a model: a turn of its loop, and its prefix cache.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--running", type=int, default=256, help="requests that run at a time")
    parser.add_argument("--waiting", type=int, default=10_000, help="requests that wait")
    parser.add_argument("--parts", nargs="+", choices=list(_PARTS), default=list(_PARTS), help="what to measure")
    parser.add_argument("--turns", type=int, help=f"turns of a round ({_TURNS}, with --quick {_QUICK_TURNS})")
    parser.add_argument("--rounds", type=int, help=f"rounds ({_ROUNDS}, with --quick {_QUICK_ROUNDS})")
    parser.add_argument("--quick", action="store_true", help="fewer turns and rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    return parser
