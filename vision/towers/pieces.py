"""A tower's work in pieces of bounded cost, so that other work can run between them.

Work is a generator (`Steps`) that returns its result. It yields each piece's cost before it computes the piece, so a
piece that would take too long now can wait. `finish` runs all of it at once: there is no other way to compute a tower.
Enter `torch.inference_mode` around each resumption or around `finish`, not inside a generator.

Cutting changes no bit. Our operators compute each row by itself, so their tiles have the size that a limit allows.
Torch's products may sum in another order for another number of rows. So torch's tiles on a CPU always have the same
size, whatever the limit. On a GPU nothing is cut: pieces are launches.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

T = TypeVar("T")

TORCH_ROWS = 512
"""Most rows of a tile when torch computes on a CPU."""
# A multiple of rows for our operators' tiles: they take rows by 6 and by 16, and read a whole weight for each tile.
_ROUND_ROWS = 48


class Kind(enum.Enum):
    """The kind of a piece; each kind has a speed of its own."""

    PRODUCT = "product"
    ATTENTION = "attention"
    ELEMENTS = "elements"


@dataclass(frozen=True, slots=True)
class Piece:
    """The next piece. `cost`: floating-point operations; for ELEMENTS, the numbers written."""

    kind: Kind
    cost: float


Steps: TypeAlias = Generator[Piece, None, T]


PieceLimits: TypeAlias = Callable[[Kind], float]
"""Returns the approximate cost of a piece, now: it is asked again and again. A piece that cannot be cut further is
larger."""


UNLIMITED: PieceLimits = dict.fromkeys(Kind, math.inf).__getitem__
"""Pieces are as large as possible."""


def finish(steps: Steps[T]) -> T:
    """Run work to its end, and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def limited_tiles(
    count: int, cost: float, limits: PieceLimits, kind: Kind, *, most: int = 1 << 20, multiple: int = _ROUND_ROWS
) -> Iterator[slice]:
    """Cut `count` rows into tiles within the limit at the time; while the limit stays, they have about the same size.

    `cost`: of a row. `most`: rows of a tile. `multiple`: of rows, except in the last tile. The smallest tile can exceed
    a very low limit.
    """
    first = 0
    while first < count:
        left = count - first
        rows = max(multiple, int(min(most, limits(kind) / cost)) // multiple * multiple)
        even = -(-left // -(-left // rows))
        stop = min(count, first + -(-even // multiple) * multiple)
        yield slice(first, stop)
        first = stop


def even_tiles(count: int, rows: int) -> list[slice]:
    """Cut `count` rows into tiles of `rows` each; the last may have fewer."""
    rows = max(1, rows)
    return [slice(first, min(first + rows, count)) for first in range(0, count, rows)]
