"""How many requests captured decode steps are made for, and for how many of these sizes there is memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

DEFAULT_MOST = 256
"""Requests of the largest step that is captured, unless a setting says otherwise: beyond, computing a step takes longer
than launching it."""


def batch_sizes(most: int) -> tuple[int, ...]:
    """Sizes to capture for up to `most` requests: 1, 2, 4, 8, 16 ... 64, 80 ... 256, 288 ..., and `most` itself.

    Products compute tiles of 64 rows or more, so that a few rows of padding cost them nothing.
    """
    usual = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most, 32))
    return (*(size for size in usual if size < most), most)


def chosen_sizes(*, max_running_requests: int, given: Iterable[int] | None, most: int | None) -> tuple[int, ...]:
    """Sizes to capture, ascending: `given`, or the usual ones. None is beyond `most` (default: `DEFAULT_MOST`, unless
    sizes are given) or beyond what may run together; a size that is becomes the largest that is not."""
    if given is None:
        return batch_sizes(min(max_running_requests, most or DEFAULT_MOST))
    limit = min(max_running_requests, most or max_running_requests)
    return tuple(sorted({min(size, limit) for size in given}))


@dataclass(frozen=True, kw_only=True)
class GraphCost:
    """Bytes of captured steps. first: of the largest, with what all share. more: of each further one."""

    first: int
    more: int

    def of(self, count: int) -> int:
        """Of so many, the largest of them among these."""
        return self.first + self.more * (count - 1) if count else 0


def affordable(sizes: tuple[int, ...], cost: GraphCost, room: int) -> tuple[int, ...]:
    """Those of `sizes`, ascending, that take no more than `room` bytes: the smallest, since the fewer requests a step
    has, the larger the part of it that is launching. cost: with the largest of all."""
    return max((sizes[:count] for count in range(len(sizes) + 1) if cost.of(count) <= max(0, room)), key=len)


def shown(sizes: tuple[int, ...]) -> str:
    """For people: 1, 2, 4 ... 64."""
    return ", ".join(map(str, sizes)) if len(sizes) < 5 else f"{', '.join(map(str, sizes[:3]))} ... {sizes[-1]}"
