"""Prefix cache as a radix tree over token ids and media pad values (RadixAttention; Zheng et al. 2024).

Keys in, KV slots and opaque handles out: it never sees a request.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from typing import TypeAlias

import numpy as np
import torch

from vlmserve.memory.allocator import TokenToKVPoolAllocator
from vlmserve.memory.kv_transfer import KVCopyJob
from vlmserve.memory.radix_tree import NO_SLOTS, RadixNode, RadixTree
from vlmserve_common.errors import EngineError

EvictionPolicy: TypeAlias = Callable[[RadixNode], tuple[int, int]]
"""A node's rank: the lowest goes first. While a node is cached its rank may only rise; see `EvictionQueue`."""

EVICTION_POLICIES: dict[str, EvictionPolicy] = {
    "lru": lambda node: (0, node.last_access),
    "lfu": lambda node: (node.hits, node.last_access),
    "fifo": lambda node: (0, node.created),
    "priority": lambda node: (node.priority, node.last_access),
}
"""By their names in --radix-eviction-policy. lfu: the fewest hits, then the least recently used. fifo: the oldest.
priority: the lowest priority, then the least recently used."""


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


class EvictionQueue:
    """Nodes that wait to be evicted, in a heap.

    A node's place is corrected when it comes to the front. Its rank can only have risen since, so no node behind it was
    due earlier, and a match costs the heap nothing. A node that may not be evicted when it comes to the front leaves;
    `add` it again when it may.
    """

    def __init__(self, policy: EvictionPolicy, is_evictable: Callable[[RadixNode], bool]) -> None:
        self._policy = policy
        self._is_evictable = is_evictable
        self._heap: list[tuple[tuple[int, int], int, RadixNode]] = []
        self._waiting: set[RadixNode] = set()
        self._tickets = itertools.count()  # orders equal ranks, so that nodes are never compared

    def add(self, node: RadixNode) -> None:
        """Let a node wait, if it may be evicted and does not wait already."""
        if node not in self._waiting and self._is_evictable(node):
            self._waiting.add(node)
            heappush(self._heap, (self._policy(node), next(self._tickets), node))

    def pop(self) -> RadixNode | None:
        """Take out and return the node to evict next; None if there is none."""
        while self._heap:
            rank, _, node = self._heap[0]
            evictable = self._is_evictable(node)
            if evictable and (now := self._policy(node)) > rank:
                heapreplace(self._heap, (now, next(self._tickets), node))
                continue
            heappop(self._heap)
            self._waiting.remove(node)
            if evictable:
                return node
        return None


class RadixCache:
    """KV slots, found by the keys that they were computed from: int64 arrays of token ids (>= 0) and media pad values
    (< 0). It owns the slots that `insert` gave it, until `evict` or `reset` frees them through the allocator.

    Namespaces share nothing: a tenant's salt, an adapter's name. A handle is good while it is locked, or until
    something is evicted. Eviction takes whole leaves, in the order of the policy, even if fewer pages are asked for.
    The freed slots then lie in long runs that growing requests can use.

    allocator: gets evicted slots. policy: a name in `EVICTION_POLICIES`. shares: if not, nothing is ever cached, and
    callers must not `insert`.
    """

    def __init__(self, allocator: TokenToKVPoolAllocator, *, policy: str = "lru", shares: bool = True) -> None:
        self.page_size = allocator.page_size
        self.shares = shares
        self._allocator = allocator
        self._tree = RadixTree(allocator.page_size)
        self._policy = EVICTION_POLICIES[policy]
        self._queue = EvictionQueue(self._policy, self._is_evictable)
        self._evictable = 0
        self._protected = 0
        self._jobs: list[KVCopyJob] = []

    def match_prefix(self, key: np.ndarray, namespace: bytes = b"", *, count_hit: bool = True) -> MatchResult:
        """Find the longest cached prefix of `key`. It counts as used now, and for eviction as hit if `count_hit`."""
        nodes = self._tree.descend(key, namespace)
        if count_hit:
            for node in nodes:
                node.hits += 1
        return self._result(nodes)

    def match_len(self, key: np.ndarray, namespace: bytes = b"") -> int:
        """Return the tokens that `match_prefix` would find on the device and on the host; change nothing."""
        return sum(common for _, common in self._tree.walk(key, namespace))

    def match_slots(self, key: np.ndarray, namespace: bytes = b"") -> np.ndarray:
        """Return the device's slots, int64, that `match_prefix` would find; change nothing."""
        walk = self._tree.walk(key, namespace)
        return np.concatenate([NO_SLOTS, *(node.values[:common] for node, common in walk)])

    def path_ids(self, key: np.ndarray, namespace: bytes = b"") -> list[int]:
        """Return the numbers of the nodes along the cached prefix of `key`, from the root; change nothing."""
        return [id(node) for node, common in self._tree.walk(key, namespace) if common]

    def insert(self, key: np.ndarray, values: np.ndarray, namespace: bytes = b"", *, priority: int = 0) -> int:
        """Cache key[:n] with KV slots values[:n]; n is len(key) rounded down to whole pages.

        Return how many leading tokens, a multiple of page_size, were on the device already. For those the cache keeps
        its own slots, and values that differ from them remain the caller's to free. It owns values[returned:n] from
        here on; values[n:] remain the caller's. Arrays are copied.

        priority: a prefix has the highest priority of all requests that inserted it.
        """
        length = self._tree.whole_pages(len(key))
        nodes = self._tree.descend(key, namespace)
        already = sum(len(node.key) for node in nodes if node.on_device)
        start = already
        for node in nodes:
            node.priority = max(node.priority, priority)
            if not node.on_device:  # known on the host only, and now computed again
                self._own(node, values[start : start + len(node.key)])
                start += len(node.key)
        if start < length:
            leaf = self._tree.add(nodes[-1] if nodes else self._tree.root, key, start, length, namespace)
            leaf.priority = priority
            self._own(leaf, values[start:length])
        return already

    def carry(self, node: RadixNode, places: np.ndarray, key: np.ndarray, namespace: bytes) -> int:
        """Cache the beginning of `key` with copies of KV that a locked prefix has, as far as the tokens are the same.

        places: int64, of key's first tokens in the prefix. The namespace must be one in which other KV than that of its
        own tokens is allowed. Return how many tokens were copied: none without room, or if they are cached already.
        """
        nodes = self._tree.path(node)[::-1]
        tokens, slots = (np.concatenate(parts) for parts in zip(*((one.key, one.values) for one in nodes), strict=True))
        places = places[: len(key)]
        same = places < len(tokens)
        same[same] = tokens[places[same]] == key[: len(places)][same]
        length = self._tree.whole_pages(len(places) if same.all() else int(same.argmin()))
        if length <= self.match_len(key[:length], namespace):
            return 0
        self.evict(self._allocator.tokens_needed(0, length) - self._allocator.available_size())
        copies = self._allocator.alloc_extend(0, length, -1)
        if copies is None:
            return 0
        self._jobs.append(KVCopyJob(direction="on_device", device_slots=slots[places[:length]], to_slots=copies))
        already = self.insert(key[:length], copies, namespace)
        self._allocator.free(copies[:already])
        return length - already

    def inc_lock_ref(self, node: RadixNode) -> None:
        """Protect a matched prefix from eviction, until as many calls of `dec_lock_ref`. EngineError if it was
        evicted."""
        for part in self._tree.path(node):
            if not part.lock_ref:
                self._evictable -= len(part.key)
                self._protected += len(part.key)
            part.lock_ref += 1

    def dec_lock_ref(self, node: RadixNode) -> None:
        """Take one protection back. Raises EngineError if there is none."""
        path = self._tree.path(node)
        if any(not part.lock_ref for part in path):
            raise EngineError("a cached prefix was unlocked more often than it was locked")
        for part in path:
            part.lock_ref -= 1
            if not part.lock_ref:
                self._protected -= len(part.key)
                self._evictable += len(part.key)
                self._queue.add(part)

    def evict(self, num_tokens: int) -> int:
        """Free at least num_tokens unprotected tokens of the device, or all there are; return how many were freed."""
        freed = 0
        while freed < num_tokens and (node := self._queue.pop()) is not None:
            freed += len(node.key)
            self._let_go(node)
        return freed

    def evictable_size(self) -> int:
        """Cached tokens on the device that are not protected."""
        return self._evictable

    def protected_size(self) -> int:
        """Cached tokens on the device that are protected."""
        return self._protected

    def reset(self) -> int:
        """Forget and free all that is not protected; return how many tokens of the device were freed."""
        freed = 0
        while (node := self._queue.pop()) is not None:
            freed += len(node.key)
            self._forget(node)
        return freed

    def live_keys(self) -> set[int]:
        """Return the media pad values (negative ids) in cached keys, for `MediaKeyTable.retain`. O(cached tokens)."""
        return self._tree.live_keys()

    # ------------------------------------------------------------ other tiers, of which there are none here

    def load_back(self, match: MatchResult) -> MatchResult:
        """Bring the host's part of a fresh match to the device, as far as there is room, evicting if need be."""
        return match

    def prefetch(self, key: np.ndarray, namespace: bytes = b"") -> Future[torch.Tensor] | None:
        """Begin to read from disk how `key` goes on behind its cached prefix; None if the disk has nothing. When the
        result is done, `take_fetched` makes it known."""
        return None

    def take_fetched(self) -> int:
        """Take finished reads; return how many tokens these were."""
        return 0

    def take_copy_jobs(self) -> tuple[KVCopyJob, ...]:
        """Return copies to be done before the next forward pass, in this order."""
        jobs, self._jobs = tuple(self._jobs), []
        return jobs

    def close(self, timeout_s: float | None = None) -> int:
        """Write cached prefixes to disk; see `HiRadixCache.close`."""
        return 0

    # ------------------------------------------------------------ nodes

    def _result(self, nodes: list[RadixNode]) -> MatchResult:
        """Make the result of a prefix's nodes, from the top. Nodes on the device come first."""
        root = self._tree.root
        here = [node for node in nodes if node.on_device]
        return MatchResult(
            indices=np.concatenate([node.values for node in here]) if here else NO_SLOTS,
            last_node=here[-1] if here else root,
            host_len=sum(len(node.key) for node in nodes[len(here) :]),
            last_host_node=nodes[-1] if nodes else root,
        )

    def _own(self, node: RadixNode, values: np.ndarray) -> None:
        self._tree.set_values(node, values.astype(np.int64))
        self._evictable += len(node.key)
        self._queue.add(node)

    def _is_evictable(self, node: RadixNode) -> bool:
        return node.on_device and not node.lock_ref and not node.device_children

    def _let_go(self, node: RadixNode) -> None:
        """Free the slots of an evictable node, which was evicted to make room."""
        self._forget(node)

    def _forget(self, node: RadixNode) -> None:
        parent = node.parent
        self._free_device(node)
        self._tree.remove(node)
        if parent is not None:
            self._queue.add(parent)

    def _free_device(self, node: RadixNode) -> None:
        self._evictable -= len(node.key)
        self._allocator.free(self._tree.set_values(node, NO_SLOTS))  # the tree's until now
