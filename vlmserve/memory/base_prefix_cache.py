"""The interface of prefix caches: keys in, KV slots and opaque handles out. They never see a request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np


class PrefixNode:
    """Handle of a cached prefix: what `match_prefix` returns and lock references are counted on."""

    __slots__ = ()


@dataclass(frozen=True, kw_only=True)
class MatchResult:
    """indices: int64 KV slots of the longest cached prefix, a multiple of page_size long. last_node: its handle."""

    indices: np.ndarray
    last_node: PrefixNode


class BasePrefixCache(ABC):
    """Who owns a slot: a cache owns what `insert` gave it until `evict` or `reset` frees it through the allocator.

    A key is an int64 array: token ids (>= 0) and media pad values (< 0), one for each token. Keys in different
    namespaces (a LoRA adapter, a tenant's salt) never match. Only whole pages are kept.
    """

    @property
    def disabled(self) -> bool:
        """Whether nothing is ever kept, so that a request's slots stay its own from allocation to free."""
        return False

    @abstractmethod
    def match_prefix(self, key: np.ndarray, namespace: str = "") -> MatchResult:
        """The longest cached prefix of `key`. It counts as used now, and a tree node may be split at its end."""

    @abstractmethod
    def match_len(self, key: np.ndarray, namespace: str = "") -> int:
        """Length in tokens of what `match_prefix` would return; changes nothing."""

    @abstractmethod
    def insert(self, key: np.ndarray, values: np.ndarray, namespace: str = "") -> int:
        """Cache key[:n] with KV slots values[:n], n being len(key) rounded down to whole pages.

        Returns how many leading tokens, a multiple of page_size, were cached already. For those the cache keeps its
        own slots, and values that differ from them remain the caller's to free. It owns values[returned:n] from
        here on; values[n:] remain the caller's. Arrays are copied.
        """

    @abstractmethod
    def inc_lock_ref(self, node: PrefixNode) -> None:
        """Protect a matched prefix from eviction, until as many calls of `dec_lock_ref`."""

    @abstractmethod
    def dec_lock_ref(self, node: PrefixNode) -> None:
        """Take one protection back. Raises EngineError if there is none."""

    @abstractmethod
    def evict(self, num_tokens: int) -> int:
        """Free at least num_tokens unprotected tokens, or all there are; returns how many were freed."""

    @abstractmethod
    def evictable_size(self) -> int:
        """Cached tokens that are not protected."""

    @abstractmethod
    def protected_size(self) -> int:
        """Cached tokens that are protected."""

    @abstractmethod
    def live_keys(self) -> set[int]:
        """The media pad values (negative ids) in cached keys, for `MediaKeyTable.retain`. O(cached tokens)."""

    def total_size(self) -> int:
        """Cached tokens: slots owned by the cache."""
        return self.evictable_size() + self.protected_size()

    def reset(self) -> int:
        """Forget and free all that is not protected; returns how many tokens that were."""
        return self.evict(self.evictable_size())
