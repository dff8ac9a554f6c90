"""A tower's work as pieces of bounded cost, between which whoever runs it may do other things.

Work is a generator (`Steps`). It says what each piece will cost before it computes it, so that one that would take too
long now can be left for later; its result is what it returns. `finish` runs all of it at once: there is no other way
to compute a tower. Enter `torch.inference_mode` around each resumption or around `finish`, not inside a generator.

Cutting changes no bit. Our operators compute each row by itself, so there tiles have the size that a limit allows.
Torch's products may sum in another order for another number of rows, so where torch computes on a CPU, tiles have
always the same size, whatever the limit. On a GPU nothing is cut: pieces are launches.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

T = TypeVar("T")

TORCH_ROWS = 512
"""Rows of a tile at the most, where torch computes on a CPU."""
# Of our operators' tiles: they go through rows by 6 and by 16, and read all of a weight for each tile.
_ROUND_ROWS = 48


class Kind(enum.Enum):
    """What a piece does; each kind has a speed of its own."""

    PRODUCT = "product"
    ATTENTION = "attention"
    ELEMENTS = "elements"


@dataclass(frozen=True, slots=True)
class Piece:
    """What is computed next. cost: floating-point operations; of ELEMENTS, numbers that are written."""

    kind: Kind
    cost: float


Steps: TypeAlias = Generator[Piece, None, T]


class PieceLimits(Protocol):
    """How large pieces may be; asked again and again while a tower works."""

    def most(self, kind: Kind) -> float:
        """Cost of a piece, about. One that cannot be cut further is larger."""
        ...


class Unlimited:
    """Pieces as large as they come."""

    def most(self, kind: Kind) -> float:
        """See `PieceLimits`."""
        return math.inf


UNLIMITED = Unlimited()


def finish(steps: Steps[T]) -> T:
    """Run some work to its end; its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def limited_tiles(
    count: int, cost: float, limits: PieceLimits, kind: Kind, *, most: int = 1 << 20, multiple: int = _ROUND_ROWS
) -> Iterator[slice]:
    """Cut `count` rows, of that cost each, into tiles that cost no more than the limit is when their turn comes, and
    are of about the same size while it stays.

    most: rows of a tile, at the most. multiple: of rows, but in the last tile. Where a limit is below the cost of the
    smallest tile, it is exceeded.
    """
    first = 0
    while first < count:
        left = count - first
        rows = max(multiple, int(min(most, limits.most(kind) / cost)) // multiple * multiple)
        even = -(-left // -(-left // rows))
        stop = min(count, first + -(-even // multiple) * multiple)
        yield slice(first, stop)
        first = stop


def even_tiles(count: int, rows: int) -> list[slice]:
    """Cut `count` rows into tiles of `rows` each; the last may have fewer."""
    rows = max(1, rows)
    return [slice(first, min(first + rows, count)) for first in range(0, count, rows)]
