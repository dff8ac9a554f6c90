"""The scheduler's view of a prefix cache, and the one that caches nothing."""

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
    """The longest cached prefix of a key; its length is a multiple of page_size.

    indices: int64 KV slots of the part that is on the device. last_node: its handle. host_len: tokens that follow on
    the host, which `load_back` brings to the device. last_host_node: handle of both parts.
    """

    indices: np.ndarray
    last_node: RadixNode
    host_len: int
    last_host_node: RadixNode


class PrefixCache(Protocol):
    """KV slots, found by the keys that they were computed from: int64 arrays of token ids (>= 0) and media pad values
    (< 0).

    Namespaces share nothing: a tenant's salt, an adapter's name. A handle is good while it is locked, or until
    something is evicted.
    """

    @property
    def page_size(self) -> int:
        """Tokens in a page."""

    @property
    def shares(self) -> bool:
        """Whether anything is ever cached. If not, `insert` takes nothing, and callers need not call it."""

    def match_prefix(self, key: np.ndarray, namespace: bytes = b"", *, count_hit: bool = True) -> MatchResult:
        """Find the longest cached prefix of `key`. It counts as used now, and for eviction as hit if `count_hit`."""

    def match_len(self, key: np.ndarray, namespace: bytes = b"") -> int:
        """Return the tokens that `match_prefix` would find on the device and on the host; change nothing."""

    def match_slots(self, key: np.ndarray, namespace: bytes = b"") -> np.ndarray:
        """Return the device's slots, int64, that `match_prefix` would find; change nothing."""

    def path_ids(self, key: np.ndarray, namespace: bytes = b"") -> list[int]:
        """Return the numbers of the nodes along the cached prefix of `key`, from the root; change nothing."""

    def load_back(self, match: MatchResult) -> MatchResult:
        """Bring the host's part of a fresh match to the device, as far as there is room, evicting if need be."""

    def prefetch(self, key: np.ndarray, namespace: bytes = b"") -> Future[torch.Tensor] | None:
        """Begin to read from disk how `key` goes on behind its cached prefix; None if the disk has nothing. When the
        result is done, `take_fetched` makes it known."""

    def take_fetched(self) -> int:
        """Take finished reads; return how many tokens these were."""

    def take_copy_jobs(self) -> tuple[KVCopyJob, ...]:
        """Return copies to be done before the next forward pass, in this order; see `HiRadixCache`."""

    def insert(self, key: np.ndarray, values: np.ndarray, namespace: bytes = b"", *, priority: int = 0) -> int:
        """Cache key[:n] with KV slots values[:n]; n is len(key) rounded down to whole pages.

        Return how many leading tokens, a multiple of page_size, were on the device already. For those the cache keeps
        its own slots, and values that differ from them remain the caller's to free. If it `shares`, it owns
        values[returned:n] from here on; values[n:] remain the caller's. Arrays are copied.

        priority: a prefix has the highest priority of all requests that inserted it. Raises ValueError if values do not
        cover key, or a page of theirs is not a page of the pool.
        """

    def inc_lock_ref(self, node: RadixNode) -> None:
        """Protect a matched prefix from eviction, until as many calls of `dec_lock_ref`. EngineError if it was
        evicted."""

    def dec_lock_ref(self, node: RadixNode) -> None:
        """Take one protection back. Raises EngineError if there is none."""

    def evict(self, num_tokens: int) -> int:
        """Free at least num_tokens unprotected tokens of the device, or all there are; return how many were freed."""

    def evictable_size(self) -> int:
        """Cached tokens on the device that are not protected."""

    def protected_size(self) -> int:
        """Cached tokens on the device that are protected."""

    def reset(self) -> int:
        """Forget and free all that is not protected; return how many tokens of the device were freed."""

    def live_keys(self) -> set[int]:
        """Return the media pad values (negative ids) in cached keys, for `MediaKeyTable.retain`. O(cached tokens)."""


class DeviceOnly:
    """The methods of a prefix cache whose only tier is the device."""

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
