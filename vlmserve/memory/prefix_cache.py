"""What the scheduler knows of a prefix cache, and the one that caches nothing."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from vlmserve.memory.kv_transfer import KVCopyJob
from vlmserve.memory.radix_tree import NO_SLOTS, RadixNode


@dataclass(frozen=True, kw_only=True)
class MatchResult:
    """The longest cached prefix of a key, a multiple of page_size long.

    indices: int64 KV slots of the part that is on the device. last_node: its handle. host_len: tokens that follow on
    the host, which `load_back` brings to the device. last_host_node: handle of all of it.
    """

    indices: np.ndarray
    last_node: RadixNode
    host_len: int
    last_host_node: RadixNode


class PrefixCache(Protocol):
    """KV slots by what they were computed from. Keys are int64 arrays: token ids (>= 0) and media pad values (< 0).

    Namespaces share nothing: a tenant's salt, an adapter's name. A handle is good while it is locked, or until
    something is evicted.
    """

    @property
    def page_size(self) -> int:
        """Tokens in a page."""

    @property
    def shares(self) -> bool:
        """Whether anything is ever cached. If not, `insert` takes nothing, and callers may spare themselves it."""

    def match_prefix(self, key: np.ndarray, namespace: bytes = b"", *, count_hit: bool = True) -> MatchResult:
        """The longest cached prefix of `key`. It counts as used now, and for eviction as hit if `count_hit`."""

    def match_len(self, key: np.ndarray, namespace: bytes = b"") -> int:
        """Length in tokens of what `match_prefix` would find, on the device and on the host; changes nothing."""

    def match_slots(self, key: np.ndarray, namespace: bytes = b"") -> np.ndarray:
        """int64: the slots on the device of what `match_prefix` would find; changes nothing."""

    def path_ids(self, key: np.ndarray, namespace: bytes = b"") -> list[int]:
        """The nodes along the cached prefix of `key`, from the root, by their numbers; changes nothing."""

    def load_back(self, match: MatchResult) -> MatchResult:
        """Bring what a fresh match found on the host to the device, as far as there is room, evicting if need be."""

    def prefetch(self, key: np.ndarray, namespace: bytes = b"") -> Future[torch.Tensor] | None:
        """Begin to read from disk how `key` goes on behind what is cached; None if it does not there. When the
        result is done, `take_fetched` makes it known."""

    def take_fetched(self) -> int:
        """Take what was read since; returns how many tokens that were."""

    def take_copy_jobs(self) -> tuple[KVCopyJob, ...]:
        """Copies to be done before the next forward pass, in this order; see `HiRadixCache`."""

    def insert(self, key: np.ndarray, values: np.ndarray, namespace: bytes = b"", *, priority: int = 0) -> int:
        """Cache key[:n] with KV slots values[:n], n being len(key) rounded down to whole pages.

        Returns how many leading tokens, a multiple of page_size, were on the device already. For those the cache keeps
        its own slots, and values that differ from them remain the caller's to free. If it `shares`, it owns
        values[returned:n] from here on; values[n:] remain the caller's. Arrays are copied.

        priority: the highest of those who inserted a prefix is that prefix's. Raises ValueError if values do not cover
        key, or a page of theirs is not a page of the pool.
        """

    def inc_lock_ref(self, node: RadixNode) -> None:
        """Protect a matched prefix from eviction, until as many calls of `dec_lock_ref`. EngineError for one that was
        evicted."""

    def dec_lock_ref(self, node: RadixNode) -> None:
        """Take one protection back. Raises EngineError if there is none."""

    def evict(self, num_tokens: int) -> int:
        """Free at least num_tokens unprotected tokens of the device, or all there are; returns how many were freed."""

    def evictable_size(self) -> int:
        """Cached tokens on the device that are not protected."""

    def protected_size(self) -> int:
        """Cached tokens on the device that are protected."""

    def reset(self) -> int:
        """Forget and free all that is not protected; returns how many tokens of the device that were."""

    def live_keys(self) -> set[int]:
        """The media pad values (negative ids) in cached keys, for `MediaKeyTable.retain`. O(cached tokens)."""


class DeviceOnly:
    """A prefix cache, as far as it concerns other tiers than the device: there are none."""

    def load_back(self, match: MatchResult) -> MatchResult:
        return match

    def prefetch(self, key: np.ndarray, namespace: bytes = b"") -> Future[torch.Tensor] | None:
        return None

    def take_fetched(self) -> int:
        return 0

    def take_copy_jobs(self) -> tuple[KVCopyJob, ...]:
        return ()


class ChunkCache(DeviceOnly):
    """No prefix cache: a request's slots stay its own from allocation to free, however many chunks it comes in."""

    shares = False

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._nothing = RadixNode(edge=b"", key=NO_SLOTS, parent=None, created=0)

    def match_prefix(self, key: np.ndarray, namespace: bytes = b"", *, count_hit: bool = True) -> MatchResult:
        return MatchResult(indices=NO_SLOTS, last_node=self._nothing, host_len=0, last_host_node=self._nothing)

    def match_len(self, key: np.ndarray, namespace: bytes = b"") -> int:
        return 0

    def match_slots(self, key: np.ndarray, namespace: bytes = b"") -> np.ndarray:
        return NO_SLOTS

    def path_ids(self, key: np.ndarray, namespace: bytes = b"") -> list[int]:
        return []

    def insert(self, key: np.ndarray, values: np.ndarray, namespace: bytes = b"", *, priority: int = 0) -> int:
        return 0

    def inc_lock_ref(self, node: RadixNode) -> None:
        pass

    def dec_lock_ref(self, node: RadixNode) -> None:
        pass

    def evict(self, num_tokens: int) -> int:
        return 0

    def evictable_size(self) -> int:
        return 0

    def protected_size(self) -> int:
        return 0

    def reset(self) -> int:
        return 0

    def live_keys(self) -> set[int]:
        return set()
