"""Cache groups: kinds of memory that together make a prefix of a hybrid model.

The slots of full attention lead. They name tokens: while a slot is held, it stands for one token of one prefix, in the
prefix tree or in a request. The other groups hang what they keep on these slots, so they know neither the tree nor
requests. When a page of leading slots is freed, `free_pages` lets go of what hangs on it (see
`TokenToKVPoolAllocator.on_free`).
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

    def replace_pages(self, old: np.ndarray, new: np.ndarray) -> None:
        """A request is going to use the leading pages `new` (int64 [n]) of the prefix tree instead of its own `old`,
        which hold the same tokens and are freed next: what hangs on `old` goes to `new` where that has nothing."""

    def free_pages(self, pages: np.ndarray) -> None:
        """Let go of what hangs on leading pages (int64 [n]) that are freed; nothing may need to."""


class CacheGroups:
    """What a model keeps of its tokens beside KV of full attention: nothing, for most models."""

    def __init__(self, groups: Sequence[CacheGroup] = ()) -> None:
        self._groups = tuple(groups)

    def __bool__(self) -> bool:
        return bool(self._groups)

    def common_prefix(self, slots: np.ndarray) -> int:
        """How many tokens of a cached prefix (leading slots int64 [n]) every group can go on from."""
        length = len(slots)
        while True:
            shortest = min((group.resumable(slots, length) for group in self._groups), default=length)
            if shortest == length:
                return length
            length = shortest

    def replace_pages(self, old: np.ndarray, new: np.ndarray) -> None:
        """See `CacheGroup`."""
        for group in self._groups:
            group.replace_pages(old, new)

    def free_pages(self, pages: np.ndarray) -> None:
        """See `CacheGroup`."""
        for group in self._groups:
            group.free_pages(pages)
