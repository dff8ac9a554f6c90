"""The prefix cache with a second tier in host memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

import numpy as np

from vlmserve.memory.allocator import TokenToKVPoolAllocator
from vlmserve.memory.eviction import EvictionQueue
from vlmserve.memory.kv_transfer import KVCopyJob
from vlmserve.memory.prefix_cache import MatchResult
from vlmserve.memory.radix_cache import RadixCache
from vlmserve.memory.radix_tree import NO_SLOTS, RadixNode

WritePolicy: TypeAlias = Literal["write_back", "write_through_selective"]


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

    host: the allocator of slots in the `HostKVPool`, of the same page size.
    """

    def __init__(
        self,
        allocator: TokenToKVPoolAllocator,
        host: TokenToKVPoolAllocator,
        *,
        policy: str = "lru",
        write_policy: WritePolicy = "write_back",
        write_through_hits: int = 2,
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

    def take_copy_jobs(self) -> tuple[KVCopyJob, ...]:
        jobs, self._jobs = tuple(self._jobs), []
        return jobs

    def host_cached_size(self) -> int:
        """Tokens that are kept on the host, whether on the device too or not; with the host's free ones, all of it."""
        return self._host.size - self._host.available_size()

    def reset(self) -> int:
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
        length = len(node.key)
        if length > self._host.size:
            return
        while self._host.available_size() < length and (victim := self._host_queue.pop()) is not None:
            self._forget_host(victim)
        slots = self._host.alloc_extend(0, length, -1)
        if slots is not None:
            self._jobs.append(KVCopyJob(direction="to_host", device_slots=node.values, host_slots=slots))
            self._tree.set_host_values(node, slots)
            self._host_queue.add(node)

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
