"""Timing of alternatives in turns, so that a busy machine is equally unkind to all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds of each round: of CPU time over all threads of this process, and by the clock."""

    cpu: tuple[float, ...]
    wall: tuple[float, ...]

    def median(self) -> tuple[float, float]:
        """(CPU, clock)."""
        return statistics.median(self.cpu), statistics.median(self.wall)


def in_turns(
    alternatives: Mapping[str, Callable[[], object]], rounds: int, clock: Callable[[], float] = time.process_time
) -> dict[str, Timing]:
    """Call each alternative once to warm up, then all of them in every round. clock: of CPU time, in seconds."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in alternatives}
    for number in range(-1, rounds):
        for name, function in alternatives.items():
            cpu, wall = clock(), time.perf_counter()
            function()
            if number >= 0:
                taken[name].append((clock() - cpu, time.perf_counter() - wall))
    return {
        name: Timing(cpu=tuple(cpu for cpu, _ in times), wall=tuple(wall for _, wall in times))
        for name, times in taken.items()
    }


def ratios(slow: tuple[float, ...], quick: tuple[float, ...]) -> tuple[float, float, float]:
    """(median, least, most) of how many times as long `slow` took, round by round."""
    each = [a / b for a, b in zip(slow, quick, strict=True)]
    return statistics.median(each), min(each), max(each)


def shown(ratio: tuple[float, float, float]) -> str:
    """What `ratios` gives, for people."""
    middle, least, most = ratio
    return f"{middle:.2f} x ({least:.2f} to {most:.2f})"
