"""The prefix cache with a second tier in host memory, and a third one on disk."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch

from vlmserve.memory.allocator import TokenToKVPoolAllocator
from vlmserve.memory.kv_storage import KVStorage
from vlmserve.memory.kv_transfer import KVCopyJob, KVTransfer
from vlmserve.memory.media_keys import MediaIdentity, namespace_digest, page_digests
from vlmserve.memory.radix_cache import EvictionQueue, MatchResult, RadixCache
from vlmserve.memory.radix_tree import NO_SLOTS, RadixNode

WritePolicy: TypeAlias = Literal["write_back", "write_through_selective"]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Fetch:
    """A read from disk of how `key` goes on from `start`, a page's end: rows uint8 [tokens, bytes_per_token]."""

    key: np.ndarray
    namespace: bytes
    start: int
    rows: Future[torch.Tensor]


class HiRadixCache(RadixCache):
    """One tree over both tiers. The device's part begins at the root: below a node that is on the host only, all nodes
    are on the host only. Each tier gives up its own leaves, by the same policy.

    write_policy: "write_back" copies a node to the host when the device gives it up. "write_through_selective" copies
    it when it was hit `write_through_hits` times; a node that was not is gone when it is evicted.

    The cache only plans. It hands copies out as jobs (`take_copy_jobs`), which are done on the model's thread before
    the next forward pass, in their order. Their order makes three things safe. Slots of the device are free as soon as
    a node is evicted: the job that reads them is done before the next step writes them. Host slots may be given away
    while jobs that read them wait: the job that writes them waits behind these. A prefix that is loaded back may be
    used by the step that brings its job. Therefore jobs that were taken must be done, even if their step is not. KV may
    be inserted only if the step that computes it was sent before the next jobs are.

    host: the allocator of slots in the `KVTransfer`, of the same page size. storage: gets the host's evicted prefixes,
    which `prefetch` finds again; threads read and write its files. identity: names pad values in the same way in every
    process. transfer: does the copies of `close`. Storage needs both.
    """

    def __init__(
        self,
        allocator: TokenToKVPoolAllocator,
        host: TokenToKVPoolAllocator,
        *,
        policy: str = "lru",
        write_policy: WritePolicy = "write_back",
        write_through_hits: int = 2,
        storage: KVStorage | None = None,
        identity: MediaIdentity | None = None,
        transfer: KVTransfer | None = None,
    ) -> None:
        super().__init__(allocator, policy=policy)
        self._host = host
        self._host_queue = EvictionQueue(self._policy, self._is_host_evictable)
        self._write_back = write_policy == "write_back"
        self._write_through_hits = write_through_hits
        self._kept: set[RadixNode] = set()
        self._storage = storage
        self._identity = identity
        self._transfer = transfer
        self._fetches: list[_Fetch] = []

    def match_prefix(self, key: np.ndarray, namespace: bytes = b"", *, count_hit: bool = True) -> MatchResult:
        match = super().match_prefix(key, namespace, count_hit=count_hit)
        if not self._write_back and count_hit:
            with self._keeping(self._tree.path(match.last_host_node)):
                for node in reversed(self._tree.path(match.last_node)):
                    if node.hits >= self._write_through_hits and not node.on_host:
                        self._copy_to_host(node)
        return match

    def load_back(self, match: MatchResult) -> MatchResult:
        """Bring the host's part of a fresh match to the device, as far as there is room, evicting if need be.

        Return the match as it is now; lock it at once. Its handles are the nodes of the old match.
        """
        if not match.host_len:
            return match
        nodes = self._tree.path(match.last_host_node)[::-1]
        last, length = match.last_node, len(match.indices)
        last_slot = int(match.indices[-1]) if length else -1
        self.inc_lock_ref(last)
        with self._keeping(nodes):
            for node in nodes:
                if node.on_device:
                    continue
                slots = self._allocate(length, length + len(node.key), last_slot)
                if slots is None:
                    break
                self._jobs.append(KVCopyJob(direction="to_device", device_slots=slots, host_slots=node.host_values))
                self._own(node, slots)
                self.inc_lock_ref(node)
                self.dec_lock_ref(last)
                last, length, last_slot = node, length + len(node.key), int(slots[-1])
        self.dec_lock_ref(last)
        return self._result(nodes)

    def prefetch(self, key: np.ndarray, namespace: bytes = b"") -> Future[torch.Tensor] | None:
        """Begin to read from storage how `key` goes on behind its cached prefix; None if storage has nothing. When the
        result is done, `take_fetched` puts it on the host."""
        length = self._tree.whole_pages(len(key))
        if self._storage is None:
            return None
        nodes = [node for node, common in self._tree.walk(key, namespace) if common == len(node.key)]
        start = sum(len(node.key) for node in nodes)
        try:
            before = self._digests(nodes[-1])[-1] if nodes else namespace_digest(namespace)
            first = next(self._page_digests(key[start : start + self.page_size], before), None)
            if first is None or first not in self._storage:
                return None
            pages = list(self._page_digests(key[start:length], before))
        except KeyError:  # a medium that is not known any more
            return None
        future = self._storage.load(pages)
        self._fetches.append(_Fetch(key=key[:length].copy(), namespace=namespace, start=start, rows=future))
        return future

    def take_fetched(self) -> int:
        """Put finished reads on the host; return how many tokens these were."""
        done = [fetch for fetch in self._fetches if fetch.rows.done()]
        self._fetches = [fetch for fetch in self._fetches if fetch not in done]
        return sum(self._take(fetch, fetch.rows.result()) for fetch in done if not fetch.rows.exception())

    def close(self, timeout_s: float | None = None) -> int:
        """Write all prefixes that no disk has, as far as the disk has room, for so many seconds at most (None: no
        limit), and end the storage's threads. Call it last, when no step is in flight. Return how many tokens of cached
        prefixes there was no time for: those that were used the longest ago.

        It writes one piece at a time, because a waiting piece lies in memory a second time.
        """
        storage, transfer = self._storage, self._transfer
        if storage is None or transfer is None:
            return 0
        ends = None if timeout_s is None else time.monotonic() + timeout_s

        def left() -> float | None:
            return None if ends is None else ends - time.monotonic()

        transfer.run(self.take_copy_jobs())
        waiting = self._unstored(storage, transfer.piece_tokens)
        last = 0
        while waiting and storage.flush(left()):
            job = waiting.popleft()
            transfer.run([job])
            last = len(job.pages)
        written = storage.close(left())
        return (sum(len(job.pages) for job in waiting) + (0 if written else last)) * self.page_size

    def _unstored(self, storage: KVStorage, most_tokens: int) -> deque[KVCopyJob]:
        """Return jobs for everything that evicting all nodes would write to disk, as far as there is room. The most
        recently used come first, a prefix before its continuation. A piece has at most so many tokens, or a page."""
        pages_each, room = max(1, most_tokens // self.page_size), storage.limit_bytes
        jobs: deque[KVCopyJob] = deque()
        leaves = sorted(self._tree.below(self._tree.root), key=lambda node: -node.last_access)
        for node in dict.fromkeys(node for leaf in leaves for node in reversed(self._tree.path(leaf))):
            pages = self._new_pages(node) if node.on_host or self._write_back else []
            for at in range(0, len(pages), pages_each):
                piece = slice(at * self.page_size, (at + pages_each) * self.page_size)
                job = KVCopyJob(
                    direction="to_storage",
                    host_slots=node.host_values[piece],
                    device_slots=None if node.on_host else node.values[piece],
                    pages=tuple(pages[at : at + pages_each]),
                )
                room -= storage.file_bytes(len(job.pages))
                if room < 0:
                    return jobs
                jobs.append(job)
        return jobs

    def reset(self) -> int:
        self._fetches.clear()
        while (node := self._host_queue.pop()) is not None:
            self._forget_host(node)
        return super().reset()

    def _allocate(self, start: int, end: int, last_slot: int) -> np.ndarray | None:
        short = end - start - self._allocator.available_size()
        if short > self._evictable:
            return None
        self.evict(short)
        return self._allocator.alloc_extend(start, end, last_slot)

    def _let_go(self, node: RadixNode) -> None:
        """Evict a node from the device. It stays if it is on the host, or can be copied there; otherwise it is gone,
        with all below it on the host."""
        if not node.on_host and self._write_back:
            self._copy_to_host(node)
        if not node.on_host:
            for lower in reversed(self._tree.below(node)[1:]):
                self._forget_host(lower)
            self._forget(node)
            return
        self._free_device(node)
        assert node.parent is not None
        self._queue.add(node.parent)

    def _copy_to_host(self, node: RadixNode) -> None:
        """Give a node of the device slots on the host, too, and plan the copy; do nothing if there is no room."""
        slots = self._allocate_host(len(node.key))
        if slots is not None:
            self._jobs.append(KVCopyJob(direction="to_host", device_slots=node.values, host_slots=slots))
            self._tree.set_host_values(node, slots)
            self._host_queue.add(node)

    def _allocate_host(self, length: int) -> np.ndarray | None:
        if length > self._host.size:
            return None
        while self._host.available_size() < length and (victim := self._host_queue.pop()) is not None:
            self._store(victim)
            self._forget_host(victim)
        return self._host.alloc_extend(0, length, -1)

    def _store(self, node: RadixNode) -> None:
        if pages := self._new_pages(node):
            self._jobs.append(KVCopyJob(direction="to_storage", host_slots=node.host_values, pages=tuple(pages)))

    def _new_pages(self, node: RadixNode) -> list[bytes]:
        """Return the digests of a node's pages; none without storage, if storage has them, or if a medium is not known
        any more."""
        with contextlib.suppress(KeyError):
            if self._storage is not None and (pages := self._digests(node))[0] not in self._storage:
                return pages
        return []

    def _take(self, fetch: _Fetch, rows: torch.Tensor) -> int:
        """Put a finished read on the host, as far as it is new and still continues a cached prefix."""
        end = fetch.start + len(rows)
        nodes = self._tree.descend(fetch.key[:end], fetch.namespace)
        start = sum(len(node.key) for node in nodes)
        if not fetch.start <= start < end:
            return 0
        with self._keeping(nodes):
            slots = self._allocate_host(end - start)
        if slots is None:
            return 0
        parent = nodes[-1] if nodes else self._tree.root
        node = self._tree.add(parent, fetch.key, start, end, fetch.namespace)
        self._jobs.append(KVCopyJob(direction="from_storage", host_slots=slots, rows=rows[start - fetch.start :]))
        self._tree.set_host_values(node, slots)
        self._host_queue.add(node)
        return end - start

    def _digests(self, node: RadixNode) -> list[bytes]:
        """Return the digests of a node's pages. KeyError for a medium that is not known any more."""
        path = self._tree.path(node)[::-1]
        before = namespace_digest(self._tree.namespace(path[0]))
        for part in path[:-1]:
            if part.digest is None:
                *_, part.digest = self._page_digests(part.key, before)
            before = part.digest
        pages = list(self._page_digests(node.key, before))
        node.digest = pages[-1]
        return pages

    def _page_digests(self, key: np.ndarray, before: bytes) -> Iterator[bytes]:
        assert self._identity is not None
        return page_digests(key, before, page_size=self.page_size, identity=self._identity)

    @contextlib.contextmanager
    def _keeping(self, nodes: Sequence[RadixNode]) -> Iterator[None]:
        self._kept.update(nodes)
        yield
        self._kept.clear()
        for node in nodes:
            self._host_queue.add(node)

    def _is_host_evictable(self, node: RadixNode) -> bool:
        return node.on_host and not node.host_children and node not in self._kept

    def _forget_host(self, node: RadixNode) -> None:
        """Free the host slots of a leaf of the host's part; a node that is nowhere else is gone."""
        parent = node.parent
        assert parent is not None
        self._host.free(self._tree.set_host_values(node, NO_SLOTS))  # the tree's until now
        if not node.on_device:
            self._tree.remove(node)
        self._host_queue.add(parent)
