"""The prefix cache that caches nothing (`--disable-radix-cache`)."""

from __future__ import annotations

import numpy as np

from vlmserve.memory.base_prefix_cache import BasePrefixCache, MatchResult, PrefixNode


class ChunkCache(BasePrefixCache):
    """Never matches and never owns a slot: a request keeps its own between chunks, and frees them all at its end.

    page_size: slots in a page.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._root = PrefixNode()

    @property
    def disabled(self) -> bool:
        """True: callers need not insert, and may not expect a prefix that they inserted to match."""
        return True

    def match_prefix(self, key: np.ndarray, namespace: str = "") -> MatchResult:
        """Nothing."""
        return MatchResult(indices=np.empty(0, dtype=np.int64), last_node=self._root)

    def match_len(self, key: np.ndarray, namespace: str = "") -> int:
        """0."""
        return 0

    def insert(self, key: np.ndarray, values: np.ndarray, namespace: str = "") -> int:
        """Takes nothing: returns len(key) in whole pages, so that by the interface's rule the caller frees all."""
        return len(key) // self.page_size * self.page_size

    def inc_lock_ref(self, node: PrefixNode) -> None:
        """Nothing to protect."""

    def dec_lock_ref(self, node: PrefixNode) -> None:
        """Nothing to protect."""

    def evict(self, num_tokens: int) -> int:
        """Nothing to free."""
        return 0

    def evictable_size(self) -> int:
        """0."""
        return 0

    def protected_size(self) -> int:
        """0."""
        return 0

    def live_keys(self) -> set[int]:
        """None."""
        return set()
