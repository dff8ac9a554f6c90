"""Prefix cache as a radix tree over token ids and media pad values (RadixAttention; Zheng et al. 2024).

Keys in, KV slots and opaque handles out: it never sees a request.
"""

from __future__ import annotations

import numpy as np

from vlmserve.memory.allocator import TokenToKVPoolAllocator
from vlmserve.memory.eviction import EvictionQueue, eviction_policy
from vlmserve.memory.prefix_cache import DeviceOnly, MatchResult
from vlmserve.memory.radix_tree import NO_SLOTS, RadixNode, RadixTree
from vlmserve_common.errors import EngineError


class RadixCache(DeviceOnly):
    """A prefix cache of whole pages. It owns the slots that `insert` gave it, until `evict` or `reset` frees them
    through the allocator.

    Eviction takes whole leaves, in the order of the policy, even if fewer pages are asked for. The freed slots then lie
    in long runs that growing requests can use. allocator: gets evicted slots. policy: a name in `EVICTION_POLICIES`.
    """

    shares = True

    def __init__(self, allocator: TokenToKVPoolAllocator, *, policy: str = "lru") -> None:
        self.page_size = allocator.page_size
        self._allocator = allocator
        self._tree = RadixTree(allocator.page_size)
        self._policy = eviction_policy(policy)
        self._queue = EvictionQueue(self._policy, self._is_evictable)
        self._evictable = 0
        self._protected = 0

    def match_prefix(self, key: np.ndarray, namespace: bytes = b"", *, count_hit: bool = True) -> MatchResult:
        nodes = self._tree.descend(key, namespace)
        if count_hit:
            for node in nodes:
                node.hits += 1
        return self._result(nodes)

    def match_len(self, key: np.ndarray, namespace: bytes = b"") -> int:
        return sum(common for _, common in self._tree.walk(key, namespace))

    def match_slots(self, key: np.ndarray, namespace: bytes = b"") -> np.ndarray:
        walk = self._tree.walk(key, namespace)
        return np.concatenate([NO_SLOTS, *(node.values[:common] for node, common in walk)])

    def path_ids(self, key: np.ndarray, namespace: bytes = b"") -> list[int]:
        return [id(node) for node, common in self._tree.walk(key, namespace) if common]

    def insert(self, key: np.ndarray, values: np.ndarray, namespace: bytes = b"", *, priority: int = 0) -> int:
        length = self._tree.whole_pages(len(key))
        if len(values) < length:
            raise ValueError(f"{len(values)} KV slots for a key of {len(key)} tokens")
        nodes = self._tree.descend(key, namespace)
        already = sum(len(node.key) for node in nodes if node.on_device)
        self._check_pages(values, already, length)
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

    def inc_lock_ref(self, node: RadixNode) -> None:
        for part in self._tree.path(node):
            if not part.lock_ref:
                self._evictable -= len(part.key)
                self._protected += len(part.key)
            part.lock_ref += 1

    def dec_lock_ref(self, node: RadixNode) -> None:
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
        freed = 0
        while freed < num_tokens and (node := self._queue.pop()) is not None:
            freed += len(node.key)
            self._let_go(node)
        return freed

    def evictable_size(self) -> int:
        return self._evictable

    def protected_size(self) -> int:
        return self._protected

    def reset(self) -> int:
        freed = 0
        while (node := self._queue.pop()) is not None:
            freed += len(node.key)
            self._forget(node)
        return freed

    def live_keys(self) -> set[int]:
        return self._tree.live_keys()

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

    def _check_pages(self, values: np.ndarray, start: int, end: int) -> None:
        pages = values[start:end].reshape(-1, self.page_size)
        if (pages != pages[:, :1] + np.arange(self.page_size)).any() or (pages[:, 0] % self.page_size).any():
            raise ValueError(f"KV slots of tokens {start}..{end - 1} are not whole pages of {self.page_size}")

    def _own(self, node: RadixNode, values: np.ndarray) -> None:
        """Give the tree the slots of a node's KV on the device."""
        self._tree.set_values(node, values.astype(np.int64))
        self._evictable += len(node.key)
        self._queue.add(node)

    def _is_evictable(self, node: RadixNode) -> bool:
        """Return whether a node is an unlocked leaf of the device's part."""
        return node.on_device and not node.lock_ref and not node.device_children

    def _let_go(self, node: RadixNode) -> None:
        """Free the slots of an evictable node, which was evicted to make room."""
        self._forget(node)

    def _forget(self, node: RadixNode) -> None:
        """Free the slots of an evictable node, and keep it nowhere."""
        parent = node.parent
        self._free_device(node)
        self._tree.remove(node)
        if parent is not None:
            self._queue.add(parent)

    def _free_device(self, node: RadixNode) -> None:
        self._evictable -= len(node.key)
        self._allocator.free(self._tree.set_values(node, NO_SLOTS))  # the tree's until now
