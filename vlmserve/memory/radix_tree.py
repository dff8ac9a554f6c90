"""A prefix tree over token ids and media pad values, in whole pages. It has structure and times of use, and owns no
slots."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from vlmserve_common.errors import EngineError

NO_SLOTS = np.empty(0, dtype=np.int64)
_ID_BYTES = NO_SLOTS.itemsize


@dataclass(eq=False, kw_only=True, slots=True)
class RadixNode:
    """A run of whole pages behind its parent's. Callers use it as the handle of the cached prefix that ends with it.

    key: int64 [n]. raw: its bytes, which are compared more quickly. values, host_values: int64 [n], slots on the device
    and on the host, or [0] for none. edge: the key under which its parent finds it: its first page, behind the
    namespace if it is at the top. lock_ref: protections of this node and of all below it. last_access, created:
    readings of the tree's clock. hits: matches that went through. device_children, host_children: how many children
    have slots there. digest: of the whole prefix that ends here, which names it beyond this process.
    """

    edge: bytes
    key: np.ndarray
    raw: bytes
    parent: RadixNode | None
    created: int
    last_access: int
    values: np.ndarray = field(default_factory=lambda: NO_SLOTS)
    host_values: np.ndarray = field(default_factory=lambda: NO_SLOTS)
    children: dict[bytes, RadixNode] = field(default_factory=dict)
    lock_ref: int = 0
    hits: int = 0
    priority: int = 0
    device_children: int = 0
    host_children: int = 0
    digest: bytes | None = None

    @property
    def on_device(self) -> bool:
        """Whether it has slots on the device."""
        return len(self.values) > 0

    @property
    def on_host(self) -> bool:
        """Whether it has slots on the host."""
        return len(self.host_values) > 0


class RadixTree:
    """Namespaces share nothing: a namespace is part of the edges that lead out of the root, so one without prefixes
    leaves nothing behind."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._clock = itertools.count(1)
        self.root = RadixNode(edge=b"", key=NO_SLOTS, raw=b"", parent=None, created=0, last_access=0)

    def whole_pages(self, length: int) -> int:
        """Round `length` down to whole pages."""
        return length - length % self.page_size

    def walk(self, key: np.ndarray, namespace: bytes = b"") -> Iterator[tuple[RadixNode, int]]:
        """Return the nodes along the known prefix of `key`, each with how many of its tokens match; change nothing."""
        node, start, end = self.root, 0, self.whole_pages(len(key))
        raw, page = key.astype(np.int64, copy=False).tobytes(), self.page_size * _ID_BYTES
        while start < end:
            at = start * _ID_BYTES
            child = node.children.get(raw[at : at + page] if start else namespace + raw[:page])
            if child is None:
                return
            length = min(len(child.key), end - start)
            common = length
            if raw[at : at + length * _ID_BYTES] != child.raw[: length * _ID_BYTES]:
                common = self.whole_pages(int((child.key[:length] != key[start : start + length]).argmax()))
            yield child, common
            if common < len(child.key):
                return
            node, start = child, start + common

    def descend(self, key: np.ndarray, namespace: bytes = b"") -> list[RadixNode]:
        """Return the nodes of the longest known prefix of `key`, after a split if need be. They count as used now."""
        now = next(self._clock)
        nodes = [
            node if common == len(node.key) else self._split(node, common)
            for node, common in list(self.walk(key, namespace))
        ]
        for node in nodes:
            node.last_access = now
        return nodes

    def add(self, parent: RadixNode, key: np.ndarray, start: int, end: int, namespace: bytes = b"") -> RadixNode:
        """Add a node for key[start:end], whole pages, behind `parent`, which ends at `start`. It has no slots yet."""
        edge, own, now = self._edge(key, start, namespace), np.array(key[start:end], dtype=np.int64), next(self._clock)
        node = RadixNode(edge=edge, key=own, raw=own.tobytes(), parent=parent, created=now, last_access=now)
        parent.children[edge] = node
        return node

    def remove(self, node: RadixNode) -> None:
        """Remove a node without children or slots; its handle becomes invalid."""
        assert node.parent is not None
        assert not node.children
        assert not node.on_device
        assert not node.on_host
        del node.parent.children[node.edge]
        node.parent = None

    def set_values(self, node: RadixNode, values: np.ndarray) -> np.ndarray:
        """Set a node's slots on the device, or with `NO_SLOTS` none; return the old ones."""
        assert node.parent is not None
        node.parent.device_children += bool(len(values)) - node.on_device
        before, node.values = node.values, values
        return before

    def set_host_values(self, node: RadixNode, values: np.ndarray) -> np.ndarray:
        """Set a node's slots on the host, or with `NO_SLOTS` none; return the old ones."""
        assert node.parent is not None
        node.parent.host_children += bool(len(values)) - node.on_host
        before, node.host_values = node.host_values, values
        return before

    def path(self, node: RadixNode) -> list[RadixNode]:
        """Return a node and those above it, without the root, from below. EngineError for a removed node."""
        path = []
        while node is not self.root:
            if node.parent is None:
                raise EngineError("a handle of a prefix that is not cached any more")
            path.append(node)
            node = node.parent
        return path

    def below(self, node: RadixNode) -> list[RadixNode]:
        """Return a node and all below it, parents first."""
        found = [node]
        for one in found:
            found.extend(one.children.values())
        return found

    def namespace(self, node: RadixNode) -> bytes:
        """Return the namespace of a node at the top."""
        return node.edge[: -_ID_BYTES * self.page_size]

    def live_keys(self) -> set[int]:
        """Return the media pad values (negative ids) in all keys. O(tokens)."""
        found: set[int] = set()
        for node in self.below(self.root):
            found.update(np.unique(node.key[node.key < 0]).tolist())
        return found

    def _edge(self, key: np.ndarray, start: int, namespace: bytes) -> bytes:
        page = key[start : start + self.page_size].astype(np.int64, copy=False).tobytes()
        return page if start else namespace + page  # pages are equally long, so two namespaces never give one edge

    def _split(self, node: RadixNode, length: int) -> RadixNode:
        """Put the first `length` tokens of `node` into a new parent, so that handles of `node` still mean all of it."""
        parent = node.parent
        assert parent is not None
        cut = length * _ID_BYTES
        upper = replace(node, key=node.key[:length].copy(), raw=node.raw[:cut], children={}, digest=None)
        upper.values, node.values = node.values[:length].copy(), node.values[length:].copy()
        upper.host_values, node.host_values = node.host_values[:length].copy(), node.host_values[length:].copy()
        upper.device_children, upper.host_children = int(node.on_device), int(node.on_host)
        parent.children[node.edge] = upper
        node.edge = node.key[length : length + self.page_size].tobytes()
        node.key, node.raw, node.parent = node.key[length:].copy(), node.raw[cut:], upper
        upper.children[node.edge] = node
        return upper
