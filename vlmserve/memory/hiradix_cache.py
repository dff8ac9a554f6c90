"""The prefix cache with a second tier in host memory, and a third one on disk."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch

from vlmserve.memory.allocator import TokenToKVPoolAllocator
from vlmserve.memory.eviction import EvictionQueue
from vlmserve.memory.kv_storage import KVStorage
from vlmserve.memory.kv_transfer import KVCopyJob
from vlmserve.memory.media_keys import MediaIdentity, namespace_digest, page_digests
from vlmserve.memory.prefix_cache import MatchResult
from vlmserve.memory.radix_cache import RadixCache
from vlmserve.memory.radix_tree import NO_SLOTS, RadixNode

WritePolicy: TypeAlias = Literal["write_back", "write_through_selective"]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Fetch:
    """Reading how `key` goes on from `start`, a page's end: rows uint8 [tokens, bytes_per_token]."""

    key: np.ndarray
    namespace: bytes
    start: int
    rows: Future[torch.Tensor]


class HiRadixCache(RadixCache):
    """One tree over both tiers. What is on the device begins at the root: below a node that is on the host only, all
    are. Each tier gives up its own leaves, by the same policy.

    write_policy: "write_back" copies a node to the host when the device gives it up; "write_through_selective" when it
    was hit `write_through_hits` times, and what was not by the time it is evicted is gone.

    It only plans. Copies are handed out as jobs (`take_copy_jobs`), to be done on the model's thread before the next
    forward pass, in their order. That order makes everything else safe that happens at once here: slots of the device
    are free as soon as a node is evicted, and may be given to a request of the very next step, because the job that
    reads them goes before that step's forward pass; host slots may be given away while jobs that read them wait,
    because the job that writes them waits behind these; and a prefix that is loaded back may be used by the step that
    brings its job along. So jobs that were taken must be done, even if their step is not, and what is inserted must
    have been computed by a step that was sent before the next jobs are.

    host: the allocator of slots in the `HostKVPool`, of the same page size. storage: where the host's evicted prefixes
    go, and `prefetch` finds them again; its files are read and written by threads. identity: what media pad values
    stand for in any process; needed with storage.
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
    ) -> None:
        if host.page_size != allocator.page_size:
            raise ValueError(f"pages of {host.page_size} tokens on the host, of {allocator.page_size} on the device")
        super().__init__(allocator, policy=policy)
        self._host = host
        self._host_queue = EvictionQueue(self._policy, self._is_host_evictable)
        self._write_back = write_policy == "write_back"
        self._write_through_hits = write_through_hits
        self._kept: set[RadixNode] = set()
        self._jobs: list[KVCopyJob] = []
        self._storage = storage
        self._identity = identity
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
        """Bring what a fresh match found on the host to the device, as far as there is room, evicting if need be.

        Returns the match as it is now; lock it at once. Its handles and the old one's are the same nodes.
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
        """Begin to read from storage how `key` goes on behind what is cached; None if it does not there. When the
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
        """Put what was read since on the host; returns how many tokens that were."""
        done = [fetch for fetch in self._fetches if fetch.rows.done()]
        self._fetches = [fetch for fetch in self._fetches if fetch not in done]
        return sum(self._take(fetch, fetch.rows.result()) for fetch in done if not fetch.rows.exception())

    def take_copy_jobs(self) -> tuple[KVCopyJob, ...]:
        jobs, self._jobs = tuple(self._jobs), []
        return jobs

    def unstored(self, most_tokens: int) -> Iterator[KVCopyJob]:
        """What the disk lacks of what would be there if all were evicted now: the most recently used first, a prefix
        before what follows it, in pieces of so many tokens at most (one page at the least). Nothing may change
        meanwhile, and no other job may wait."""
        assert self._storage is not None
        pages_each = max(1, most_tokens // self.page_size)
        seen: set[RadixNode] = set()
        for leaf in sorted(self._tree.below(self._tree.root), key=lambda node: -node.last_access):
            for node in reversed(self._tree.path(leaf)):
                if node in seen or not (node.on_host or self._write_back):
                    continue
                seen.add(node)
                with contextlib.suppress(KeyError):  # a medium that is not known any more
                    pages = self._digests(node)
                    if pages[0] in self._storage:
                        continue
                    for at in range(0, len(pages), pages_each):
                        piece = slice(at * self.page_size, (at + pages_each) * self.page_size)
                        yield KVCopyJob(
                            direction="to_storage",
                            host_slots=node.host_values[piece],
                            device_slots=None if node.on_host else node.values[piece],
                            pages=tuple(pages[at : at + pages_each]),
                        )

    def host_cached_size(self) -> int:
        """Tokens that are kept on the host, whether on the device too or not; with the host's free ones, all of it."""
        return self._host.size - self._host.available_size()

    def reset(self) -> int:
        self._fetches.clear()
        while (node := self._host_queue.pop()) is not None:
            self._forget_host(node)
        return super().reset()

    def _allocate(self, start: int, end: int, last_slot: int) -> np.ndarray | None:
        """Device slots for tokens start..end-1 behind `last_slot`, evicting if need be."""
        short = end - start - self._allocator.available_size()
        if short > self._evictable:
            return None
        self.evict(short)
        return self._allocator.alloc_extend(start, end, last_slot)

    def _let_go(self, node: RadixNode) -> None:
        """The device gives up a node: it goes on on the host if it is there, or comes to be there; else it is gone, and
        what lay below it on the host with it."""
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
        """Give a node of the device slots on the host, too, and plan the copy; nothing happens if there is no room."""
        slots = self._allocate_host(len(node.key))
        if slots is not None:
            self._jobs.append(KVCopyJob(direction="to_host", device_slots=node.values, host_slots=slots))
            self._tree.set_host_values(node, slots)
            self._host_queue.add(node)

    def _allocate_host(self, length: int) -> np.ndarray | None:
        """Host slots for so many tokens, evicting if need be."""
        if length > self._host.size:
            return None
        while self._host.available_size() < length and (victim := self._host_queue.pop()) is not None:
            self._store(victim)
            self._forget_host(victim)
        return self._host.alloc_extend(0, length, -1)

    def _store(self, node: RadixNode) -> None:
        """Plan to write what the host has of a node to storage, if there is one."""
        if self._storage is not None:
            with contextlib.suppress(KeyError):
                pages = self._digests(node)
                if pages[0] not in self._storage:
                    job = KVCopyJob(direction="to_storage", host_slots=node.host_values, pages=tuple(pages))
                    self._jobs.append(job)

    def _take(self, fetch: _Fetch, rows: torch.Tensor) -> int:
        """Put what was read on the host, as far as it still goes on from what is cached and is new."""
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
        """Of a node's pages. KeyError for a medium that is not known any more."""
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
        """Keep what these nodes have on the host from being evicted."""
        self._kept.update(nodes)
        yield
        self._kept.clear()
        for node in nodes:
            self._host_queue.add(node)

    def _is_host_evictable(self, node: RadixNode) -> bool:
        """Whether a node is a leaf of what is on the host, and not about to be read."""
        return node.on_host and not node.host_children and node not in self._kept

    def _forget_host(self, node: RadixNode) -> None:
        """Free the host slots of a leaf of the host's; a node that is nowhere else is gone."""
        parent = node.parent
        assert parent is not None
        self._host.free(self._tree.set_host_values(node, NO_SLOTS))  # the tree's until now
        if not node.on_device:
            self._tree.remove(node)
        self._host_queue.add(parent)
