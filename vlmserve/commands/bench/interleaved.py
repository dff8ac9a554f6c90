"""Timing of alternatives in turns, so that a busy machine is equally unkind to all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds of each round: of CPU time over all threads of this process, and by the clock."""

    cpu: tuple[float, ...]
    wall: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Of rounds."""

    median: float
    least: float
    most: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return Spread(median=statistics.median(values), least=min(values), most=max(values))

    def __str__(self) -> str:
        """Of a ratio."""
        return self.shown(".2f", " x")

    def shown(self, form: str, unit: str = "") -> str:
        """The median in `unit`, and the bounds."""
        return f"{self.median:{form}}{unit} ({self.least:{form}} to {self.most:{form}})"


def in_turns(
    alternatives: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.process_time
) -> dict[str, Timing]:
    """Call each alternative once to warm up, then all of them in every round. clock: of CPU time, in seconds."""
    cpu: dict[str, list[float]] = {name: [] for name in alternatives}
    wall: dict[str, list[float]] = {name: [] for name in alternatives}
    for _ in range(rounds + 1):
        for name, function in alternatives.items():
            cpu_before, wall_before = clock(), time.perf_counter()
            function()
            cpu[name].append(clock() - cpu_before)
            wall[name].append(time.perf_counter() - wall_before)
    return {name: Timing(cpu=tuple(cpu[name][1:]), wall=tuple(wall[name][1:])) for name in alternatives}


def ratios(slow: Sequence[float], quick: Sequence[float]) -> Spread:
    """How many times as long `slow` took, round by round."""
    return Spread.of([a / b for a, b in zip(slow, quick, strict=True)])
