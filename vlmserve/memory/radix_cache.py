"""Prefix cache as a radix tree over token ids and media pad values (RadixAttention; Zheng et al. 2024)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from heapq import heappop, heappush, heapreplace

import numpy as np

from vlmserve.memory.allocator import TokenToKVPoolAllocator
from vlmserve.memory.base_prefix_cache import BasePrefixCache, MatchResult, PrefixNode
from vlmserve_common.errors import EngineError

# A child is found by namespace and first page. The namespace matters at the root only; deeper it is the same anyway.
Edge = tuple[str, bytes]


class RadixNode(PrefixNode):
    """A run of whole pages behind its parent's.

    key, values: int64 [n], ids and KV slots. lock_ref: protections of this node and of all below it.
    """

    __slots__ = ("children", "edge", "key", "last_access", "lock_ref", "parent", "queued", "values")

    def __init__(self, *, edge: Edge, key: np.ndarray, values: np.ndarray, parent: RadixNode | None) -> None:
        self.edge = edge
        self.key = key
        self.values = values
        self.parent = parent
        self.children: dict[Edge, RadixNode] = {}
        self.lock_ref = 0
        self.last_access = 0.0
        self.queued = False


# What is evicted first has the smallest value. A value may rise while a node is cached, but never fall.
EvictionPolicy = Callable[[RadixNode], float]


def least_recently_used(node: RadixNode) -> float:
    """Evict what was matched or inserted the longest ago."""
    return node.last_access


EVICTION_POLICIES: dict[str, EvictionPolicy] = {"lru": least_recently_used}


class RadixCache(BasePrefixCache):
    """See `BasePrefixCache`.

    Eviction takes whole leaves, not just as many pages as are asked for: what it frees lies in long runs that growing
    requests can use. Leaves that are not locked wait in a heap. A node's place in it is put right when it is popped
    (`EvictionPolicy` values only rise), so a match costs the heap nothing.

    allocator: where evicted slots go. clock: rises from call to call; by default it counts calls.
    eviction_policy: a key of `EVICTION_POLICIES`.
    """

    def __init__(
        self,
        allocator: TokenToKVPoolAllocator,
        page_size: int,
        clock: Callable[[], float] | None = None,
        eviction_policy: str = "lru",
    ) -> None:
        if page_size != allocator.page_size:
            raise ValueError(f"a prefix cache with pages of {page_size} over pages of {allocator.page_size}")
        if eviction_policy not in EVICTION_POLICIES:
            raise ValueError(f"no eviction policy {eviction_policy!r}, only {sorted(EVICTION_POLICIES)}")
        self.page_size = page_size
        self._allocator = allocator
        self._clock: Callable[[], float] = clock or itertools.count(1).__next__
        self._priority = EVICTION_POLICIES[eviction_policy]
        nothing = np.empty(0, dtype=np.int64)
        self._root = RadixNode(edge=("", b""), key=nothing, values=nothing, parent=None)
        self._heap: list[tuple[float, int, RadixNode]] = []
        self._tickets = itertools.count()  # orders equal priorities, so that nodes are never compared
        self._evictable = 0
        self._protected = 0

    def match_prefix(self, key: np.ndarray, namespace: str = "") -> MatchResult:
        """See the base class."""
        node, _ = self._descend(key, namespace)
        parts = [part.values for part in self._path(node)]
        return MatchResult(
            indices=np.concatenate(parts[::-1]) if parts else np.empty(0, dtype=np.int64), last_node=node
        )

    def match_len(self, key: np.ndarray, namespace: str = "") -> int:
        """See the base class."""
        return sum(common for _, common in self._walk(key, namespace))

    def insert(self, key: np.ndarray, values: np.ndarray, namespace: str = "") -> int:
        """See the base class. ValueError if values do not cover key, or a page of theirs is not a page of the pool."""
        length = self._whole_pages(len(key))
        if len(values) < length:
            raise ValueError(f"{len(values)} KV slots for a key of {len(key)} tokens")
        node, matched = self._descend(key, namespace)
        if matched < length:
            pages = values[matched:length].reshape(-1, self.page_size)
            if (pages != pages[:, :1] + np.arange(self.page_size)).any() or (pages[:, 0] % self.page_size).any():
                raise ValueError(f"KV slots of tokens {matched}..{length - 1} are not whole pages of {self.page_size}")
            edge = self._edge(key, matched, namespace)
            leaf = RadixNode(
                edge=edge, key=key[matched:length].copy(), values=values[matched:length].copy(), parent=node
            )
            leaf.last_access = self._clock()
            node.children[edge] = leaf
            self._evictable += len(leaf.key)
            self._queue(leaf)
        return matched

    def inc_lock_ref(self, node: PrefixNode) -> None:
        """See the base class. Raises EngineError for a handle whose prefix was evicted."""
        path = list(self._path(node))
        for part in path:
            if not part.lock_ref:
                self._evictable -= len(part.key)
                self._protected += len(part.key)
            part.lock_ref += 1

    def dec_lock_ref(self, node: PrefixNode) -> None:
        """See the base class."""
        path = list(self._path(node))
        if any(not part.lock_ref for part in path):
            raise EngineError("a cached prefix was unlocked more often than it was locked")
        for part in path:
            part.lock_ref -= 1
            if not part.lock_ref:
                self._protected -= len(part.key)
                self._evictable += len(part.key)
                self._queue(part)

    def evict(self, num_tokens: int) -> int:
        """See the base class."""
        freed = 0
        while freed < num_tokens and self._heap:
            priority, _, node = self._heap[0]
            current = self._priority(node)
            if self._is_evictable(node) and current > priority:
                heapreplace(self._heap, (current, next(self._tickets), node))
                continue
            heappop(self._heap)
            node.queued = False
            if self._is_evictable(node):
                freed += self._drop(node)
        return freed

    def evictable_size(self) -> int:
        """See the base class."""
        return self._evictable

    def protected_size(self) -> int:
        """See the base class."""
        return self._protected

    def live_keys(self) -> set[int]:
        """See the base class."""
        found: set[int] = set()
        todo = [self._root]
        while todo:
            node = todo.pop()
            found.update(np.unique(node.key[node.key < 0]).tolist())
            todo.extend(node.children.values())
        return found

    def _whole_pages(self, length: int) -> int:
        return length - length % self.page_size

    def _edge(self, key: np.ndarray, start: int, namespace: str) -> Edge:
        return namespace, key[start : start + self.page_size].astype(np.int64, copy=False).tobytes()

    def _walk(self, key: np.ndarray, namespace: str) -> Iterator[tuple[RadixNode, int]]:
        """The nodes along the cached prefix of `key`, each with how many of its tokens match; changes nothing."""
        node, start, end = self._root, 0, self._whole_pages(len(key))
        while start < end:
            child = node.children.get(self._edge(key, start, namespace))
            if child is None:
                return
            length = min(len(child.key), end - start)
            differing = np.flatnonzero(child.key[:length] != key[start : start + length])
            common = self._whole_pages(int(differing[0])) if len(differing) else length
            yield child, common
            if common < len(child.key):
                return
            node, start = child, start + common

    def _descend(self, key: np.ndarray, namespace: str) -> tuple[RadixNode, int]:
        """The node where the cached prefix of `key` ends, after a split if need be, and the prefix's length."""
        now = self._clock()
        node, matched = self._root, 0
        for child, common in list(self._walk(key, namespace)):
            node = child if common == len(child.key) else self._split(child, common, namespace)
            node.last_access = now
            matched += common
        return node, matched

    def _split(self, node: RadixNode, length: int, namespace: str) -> RadixNode:
        """Put the first `length` tokens of `node` into a new parent, so that handles of `node` still mean all of it."""
        assert node.parent is not None
        upper = RadixNode(
            edge=node.edge, key=node.key[:length].copy(), values=node.values[:length].copy(), parent=node.parent
        )
        upper.lock_ref, upper.last_access = node.lock_ref, node.last_access
        node.parent.children[node.edge] = upper
        node.edge = self._edge(node.key, length, namespace)
        node.key, node.values, node.parent = node.key[length:].copy(), node.values[length:].copy(), upper
        upper.children[node.edge] = node
        return upper

    def _path(self, node: PrefixNode) -> Iterator[RadixNode]:
        """A node and those above it, without the root."""
        assert isinstance(node, RadixNode)
        while node is not self._root:
            if node.parent is None:
                raise EngineError("a handle of a prefix that is not cached any more")
            yield node
            node = node.parent

    def _is_evictable(self, node: RadixNode) -> bool:
        return not node.lock_ref and not node.children

    def _queue(self, node: RadixNode) -> None:
        """Let an unlocked leaf wait for eviction."""
        if node is not self._root and not node.queued and self._is_evictable(node):
            node.queued = True
            heappush(self._heap, (self._priority(node), next(self._tickets), node))

    def _drop(self, node: RadixNode) -> int:
        """Free an unlocked leaf; returns its tokens."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.edge]
        node.parent = None
        self._evictable -= len(node.key)
        self._allocator.free(node.values)  # the tree's until now
        self._queue(parent)
        return len(node.key)
