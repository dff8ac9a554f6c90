"""Cache groups: kinds of memory that together make a prefix of a hybrid model.

The slots of full attention lead. They name tokens: while a slot is held, it stands for one token of one prefix, in the
prefix tree or in a request. The other groups hang what they keep on these slots, so they know neither the tree nor
requests. When a page of leading slots is freed, `free_pages` lets go of what hangs on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class CacheGroup(Protocol):
    """One kind of memory."""

    def resumable(self, slots: np.ndarray, length: int) -> int:
        """The largest position of `length` at the most from which tokens can be computed, for all that this group
        keeps of a cached prefix with these leading slots (int64 [n], n >= length). 0 always can."""

    def free_pages(self, pages: np.ndarray) -> None:
        """Let go of what hangs on leading pages (int64 [n]) that are freed; nothing may need to."""


class FullAttention:
    """The leading group: all of a cached prefix is there."""

    def resumable(self, slots: np.ndarray, length: int) -> int:
        """`length`, as far as there are slots."""
        return min(length, len(slots))

    def free_pages(self, pages: np.ndarray) -> None:
        """The allocator has freed them."""


def common_prefix(groups: Sequence[CacheGroup], slots: np.ndarray) -> int:
    """How many tokens of a cached prefix (leading slots int64 [n]) every group can go on from."""
    length = len(slots)
    while True:
        shortest = min((group.resumable(slots, length) for group in groups), default=length)
        if shortest == length:
            return length
        length = shortest
