"""Prefix cache as a radix tree over token ids and media pad values (RadixAttention; Zheng et al. 2024).

Keys in, KV slots and opaque handles out: it never sees a request.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace

import numpy as np

from vlmserve.memory.allocator import TokenToKVPoolAllocator
from vlmserve_common.errors import EngineError


class RadixNode:
    """A run of whole pages behind its parent's; to others, the handle of a cached prefix that ends with it.

    key, values: int64 [n], ids and KV slots. edge: its first page, by which its parent finds it. lock_ref: protections
    of this node and of all below it.
    """

    __slots__ = ("children", "edge", "key", "last_access", "lock_ref", "parent", "queued", "values")

    def __init__(self, *, edge: bytes, key: np.ndarray, values: np.ndarray, parent: RadixNode | None) -> None:
        self.edge = edge
        self.key = key
        self.values = values
        self.parent = parent
        self.children: dict[bytes, RadixNode] = {}
        self.lock_ref = 0
        self.last_access = 0
        self.queued = False


@dataclass(frozen=True, kw_only=True)
class MatchResult:
    """indices: int64 KV slots of the longest cached prefix, a multiple of page_size long. last_node: its handle."""

    indices: np.ndarray
    last_node: RadixNode


class RadixCache:
    """Who owns a slot: the cache owns what `insert` gave it until `evict` or `reset` frees it through the allocator.

    A key is an int64 array: token ids (>= 0) and media pad values (< 0), one for each token. Only whole pages are kept.

    Eviction takes whole leaves, the least recently used first, not just as many pages as are asked for: what it frees
    lies in long runs that growing requests can use. Leaves that are not locked wait in a heap. A node's place in it is
    put right when it is popped (times of use only rise), so a match costs the heap nothing.

    allocator: where evicted slots go. disabled: callers insert nothing, so that a request's slots stay its own from
    allocation to free.
    """

    def __init__(self, allocator: TokenToKVPoolAllocator, *, disabled: bool = False) -> None:
        self.page_size = allocator.page_size
        self.disabled = disabled
        self._allocator = allocator
        self._clock = itertools.count(1)
        nothing = np.empty(0, dtype=np.int64)
        self._root = RadixNode(edge=b"", key=nothing, values=nothing, parent=None)
        self._heap: list[tuple[int, int, RadixNode]] = []
        self._tickets = itertools.count()  # orders equal times, so that nodes are never compared
        self._evictable = 0
        self._protected = 0

    def match_prefix(self, key: np.ndarray) -> MatchResult:
        """The longest cached prefix of `key`. It counts as used now, and a node may be split at its end."""
        node, _ = self._descend(key)
        parts = [part.values for part in self._path(node)]
        return MatchResult(
            indices=np.concatenate(parts[::-1]) if parts else np.empty(0, dtype=np.int64), last_node=node
        )

    def match_len(self, key: np.ndarray) -> int:
        """Length in tokens of what `match_prefix` would return; changes nothing."""
        return sum(common for _, common in self._walk(key))

    def path_ids(self, key: np.ndarray) -> list[int]:
        """The nodes along the cached prefix of `key`, from the root, by numbers of theirs; changes nothing."""
        return [id(node) for node, common in self._walk(key) if common]

    def insert(self, key: np.ndarray, values: np.ndarray) -> int:
        """Cache key[:n] with KV slots values[:n], n being len(key) rounded down to whole pages.

        Returns how many leading tokens, a multiple of page_size, were cached already. For those the cache keeps its
        own slots, and values that differ from them remain the caller's to free. It owns values[returned:n] from
        here on; values[n:] remain the caller's. Arrays are copied. ValueError if values do not cover key, or a page of
        theirs is not a page of the pool.
        """
        length = self._whole_pages(len(key))
        if len(values) < length:
            raise ValueError(f"{len(values)} KV slots for a key of {len(key)} tokens")
        node, matched = self._descend(key)
        if matched < length:
            pages = values[matched:length].reshape(-1, self.page_size)
            if (pages != pages[:, :1] + np.arange(self.page_size)).any() or (pages[:, 0] % self.page_size).any():
                raise ValueError(f"KV slots of tokens {matched}..{length - 1} are not whole pages of {self.page_size}")
            edge = self._edge(key, matched)
            leaf = RadixNode(
                edge=edge, key=key[matched:length].copy(), values=values[matched:length].copy(), parent=node
            )
            leaf.last_access = next(self._clock)
            node.children[edge] = leaf
            self._evictable += len(leaf.key)
            self._queue(leaf)
        return matched

    def inc_lock_ref(self, node: RadixNode) -> None:
        """Protect a matched prefix from eviction, until as many calls of `dec_lock_ref`. EngineError for one that was
        evicted."""
        path = list(self._path(node))
        for part in path:
            if not part.lock_ref:
                self._evictable -= len(part.key)
                self._protected += len(part.key)
            part.lock_ref += 1

    def dec_lock_ref(self, node: RadixNode) -> None:
        """Take one protection back. Raises EngineError if there is none."""
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
        """Free at least num_tokens unprotected tokens, or all there are; returns how many were freed."""
        freed = 0
        while freed < num_tokens and self._heap:
            queued_at, _, node = self._heap[0]
            if self._is_evictable(node) and node.last_access > queued_at:
                heapreplace(self._heap, (node.last_access, next(self._tickets), node))
                continue
            heappop(self._heap)
            node.queued = False
            if self._is_evictable(node):
                freed += self._drop(node)
        return freed

    def evictable_size(self) -> int:
        """Cached tokens that are not protected."""
        return self._evictable

    def protected_size(self) -> int:
        """Cached tokens that are protected."""
        return self._protected

    def reset(self) -> int:
        """Forget and free all that is not protected; returns how many tokens that were."""
        return self.evict(self._evictable)

    def live_keys(self) -> set[int]:
        """The media pad values (negative ids) in cached keys, for `MediaKeyTable.retain`. O(cached tokens)."""
        found: set[int] = set()
        todo = [self._root]
        while todo:
            node = todo.pop()
            found.update(np.unique(node.key[node.key < 0]).tolist())
            todo.extend(node.children.values())
        return found

    def _whole_pages(self, length: int) -> int:
        return length - length % self.page_size

    def _edge(self, key: np.ndarray, start: int) -> bytes:
        return key[start : start + self.page_size].astype(np.int64, copy=False).tobytes()

    def _walk(self, key: np.ndarray) -> Iterator[tuple[RadixNode, int]]:
        """The nodes along the cached prefix of `key`, each with how many of its tokens match; changes nothing."""
        node, start, end = self._root, 0, self._whole_pages(len(key))
        while start < end:
            child = node.children.get(self._edge(key, start))
            if child is None:
                return
            length = min(len(child.key), end - start)
            differing = np.flatnonzero(child.key[:length] != key[start : start + length])
            common = self._whole_pages(int(differing[0])) if len(differing) else length
            yield child, common
            if common < len(child.key):
                return
            node, start = child, start + common

    def _descend(self, key: np.ndarray) -> tuple[RadixNode, int]:
        """The node where the cached prefix of `key` ends, after a split if need be, and the prefix's length."""
        now = next(self._clock)
        node, matched = self._root, 0
        for child, common in list(self._walk(key)):
            node = child if common == len(child.key) else self._split(child, common)
            node.last_access = now
            matched += common
        return node, matched

    def _split(self, node: RadixNode, length: int) -> RadixNode:
        """Put the first `length` tokens of `node` into a new parent, so that handles of `node` still mean all of it."""
        assert node.parent is not None
        upper = RadixNode(
            edge=node.edge, key=node.key[:length].copy(), values=node.values[:length].copy(), parent=node.parent
        )
        upper.lock_ref, upper.last_access = node.lock_ref, node.last_access
        node.parent.children[node.edge] = upper
        node.edge = self._edge(node.key, length)
        node.key, node.values, node.parent = node.key[length:].copy(), node.values[length:].copy(), upper
        upper.children[node.edge] = node
        return upper

    def _path(self, node: RadixNode) -> Iterator[RadixNode]:
        """A node and those above it, without the root."""
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
            heappush(self._heap, (node.last_access, next(self._tickets), node))

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
