"""Cache groups: kinds of memory that together make a prefix of a hybrid model.

The slots of full attention lead. A held slot stands for one token of one prefix, in the prefix tree or in a request.
Each other group attaches its data to these slots, so it knows neither the tree nor requests. When a page of leading
slots is freed, `free_pages` drops the data attached to it (see `TokenToKVPoolAllocator.on_free`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np


class CacheGroup(Protocol):
    """One kind of memory."""

    def resumable(self, slots: np.ndarray, length: int) -> int:
        """Return the largest position, at most `length`, from which this group can go on with a cached prefix. slots:
        int64 [n], n >= length, the prefix's leading slots. Position 0 is always possible."""

    def replace_pages(self, old: np.ndarray, new: np.ndarray) -> None:
        """Move the data attached to pages `old` to pages `new` (int64 [n]) where these have none. A request is about to
        use `new`, the prefix tree's, in place of its own `old`, which hold the same tokens and are freed next."""

    def free_pages(self, pages: np.ndarray) -> None:
        """Drop the data attached to leading pages (int64 [n]) that are freed; none of it may be in use."""


class CacheGroups:
    """The groups of a model beside KV of full attention: none, for most models."""

    def __init__(self, groups: Sequence[CacheGroup] = ()) -> None:
        self._groups = tuple(groups)

    def __bool__(self) -> bool:
        return bool(self._groups)

    def common_prefix(self, slots: np.ndarray) -> int:
        """Return how many tokens of a cached prefix (leading slots int64 [n]) every group can go on from."""
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
