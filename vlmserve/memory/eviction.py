"""Eviction of cached prefixes: the policies that order them, and the queue that applies one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from heapq import heappop, heappush, heapreplace
from typing import TypeAlias

from vlmserve.memory.radix_tree import RadixNode

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


def eviction_policy(name: str) -> EvictionPolicy:
    """Return the policy of that name. ValueError if there is none."""
    try:
        return EVICTION_POLICIES[name]
    except KeyError:
        known = ", ".join(EVICTION_POLICIES)
        raise ValueError(f"no eviction policy {name!r}, only {known} (--radix-eviction-policy)") from None


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
