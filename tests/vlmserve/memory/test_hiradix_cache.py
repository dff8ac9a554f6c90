"""The prefix cache with a host tier: what its jobs leave in the slots, against a model of all slots' contents."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vlmserve.memory.allocator import TokenToKVPoolAllocator
from vlmserve.memory.hiradix_cache import HiRadixCache
from vlmserve.memory.kv_transfer import KVCopyJob
from vlmserve.memory.radix_tree import RadixNode
from vlmserve_common.errors import EngineError

NUM_PAGES = 12
SYMBOLS = st.lists(st.integers(0, 1), min_size=1, max_size=5)


class Slots:
    """What lies in every slot: the whole prefix that a token's KV was computed from. Steps wait in a queue, and do
    their jobs and then their forward pass."""

    def __init__(self) -> None:
        self.device: dict[int, tuple] = {}
        self.host: dict[int, tuple] = {}
        self.queue: list[tuple[tuple[KVCopyJob, ...], list[tuple[int, tuple]]]] = []

    def send(self, jobs: tuple[KVCopyJob, ...], computed: list[tuple[int, tuple]]) -> None:
        self.queue.append((jobs, computed))

    def run(self, steps: int) -> None:
        for jobs, computed in self.queue[:steps]:
            for job in jobs:
                assert len(job.device_slots) == len(job.host_slots) == len(set(job.host_slots.tolist()))
                sides = list(zip(job.device_slots.tolist(), job.host_slots.tolist(), strict=True))
                for device, host in sides:
                    if job.direction == "to_host":
                        self.host[host] = self.device[device]
                    else:
                        self.device[device] = self.host[host]
            self.device.update(computed)
        del self.queue[:steps]


@dataclass
class Request:
    key: tuple
    slots: np.ndarray
    protected: int
    node: RadixNode


class HiRadixMachine(RuleBasedStateMachine):
    """Requests whose prompts are computed in a step of their own, sent when they start and run some time later."""

    page_size = 2
    host_pages = 6
    write_policy = "write_back"

    def __init__(self) -> None:
        super().__init__()
        self.allocator = TokenToKVPoolAllocator(NUM_PAGES * self.page_size, self.page_size)
        self.host = TokenToKVPoolAllocator(self.host_pages * self.page_size, self.page_size)
        self.slots = Slots()
        self.requests: dict[int, Request] = {}
        self.names = itertools.count()
        self.inserted: set[tuple] = set()

    @initialize(policy=st.sampled_from(["lru", "lfu", "fifo", "priority"]))
    def make(self, policy: str) -> None:
        self.cache = HiRadixCache(self.allocator, self.host, policy=policy, write_policy=self.write_policy)

    def contents(self, key: tuple, start: int, end: int) -> list[tuple]:
        return [key[: i + 1] for i in range(start, end)]

    def known(self, key: tuple) -> int:
        """Tokens of the longest prefix, in whole pages, that was ever inserted."""
        size = self.page_size
        return max(end for end in range(0, len(key) + 1, size) if not end or key[:end] in self.inserted)

    @rule(symbols=SYMBOLS, tail=st.booleans(), loads=st.booleans())
    def start(self, symbols: list[int], tail: bool, loads: bool) -> None:
        self.begin(symbols, tail, loads)

    def begin(self, symbols: list[int], tail: bool, loads: bool) -> int | None:
        """A request's name, if it fits."""
        key = tuple(token for symbol in symbols for token in (-5, symbol)) + (7,) * tail
        array = np.array(key, dtype=np.int64)
        expected = self.cache.match_len(array)
        found = self.cache.match_prefix(array)
        assert len(found.indices) + found.host_len == expected
        assert expected <= self.known(key)
        if self.host_pages > 1000:
            assert expected == self.known(key)
        match = self.cache.load_back(found) if loads else found
        assert len(found.indices) <= len(match.indices) <= expected
        assert match.indices[: len(found.indices)].tolist() == found.indices.tolist()
        assert len(match.indices) + match.host_len == expected
        cached = len(match.indices)
        self.cache.inc_lock_ref(match.last_node)
        own = np.empty(0, dtype=np.int64)
        if cached < len(key):
            needed = self.allocator.tokens_needed(cached, len(key))
            self.cache.evict(needed - self.allocator.available_size())
            own = self.allocator.alloc_extend(cached, len(key), int(match.indices[-1]) if cached else -1)
            if own is None:
                self.cache.dec_lock_ref(match.last_node)
                return None
        slots = np.concatenate([match.indices, own])
        computed = list(zip(own.tolist(), self.contents(key, cached, len(key)), strict=True))
        self.slots.send(self.cache.take_copy_jobs(), computed)
        name = next(self.names)
        self.requests[name] = Request(key, slots, cached, match.last_node)
        return name

    @rule(symbols=SYMBOLS, loads=st.booleans())
    def serve(self, symbols: list[int], loads: bool) -> None:
        name = self.begin(symbols, tail=False, loads=loads)
        if name is not None:
            self.share(name, ends=True, priority=0)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), ends=st.booleans(), priority=st.integers(0, 1))
    def insert(self, data: st.DataObject, ends: bool, priority: int) -> None:
        """A request whose step was sent is shared, and ends or goes on."""
        self.share(data.draw(st.sampled_from(sorted(self.requests))), ends, priority)

    def share(self, name: int, ends: bool, priority: int) -> None:
        request = self.requests[name]
        key = np.array(request.key, dtype=np.int64)
        full = len(key) // self.page_size * self.page_size
        already = self.cache.insert(key, request.slots, priority=priority)
        assert request.protected <= already <= full
        self.allocator.free(request.slots[request.protected : already])
        self.inserted.update(request.key[:end] for end in range(self.page_size, full + 1, self.page_size))
        match = self.cache.match_prefix(key, count_hit=False)
        assert (len(match.indices), match.host_len) == (full, 0)
        self.cache.inc_lock_ref(match.last_node)
        self.cache.dec_lock_ref(request.node)
        request.slots[:full], request.protected, request.node = match.indices, full, match.last_node
        if ends:
            self.allocator.free(request.slots[full:])
            self.cache.dec_lock_ref(request.node)
            del self.requests[name]

    @rule(pages=st.integers(1, 12))
    def evict(self, pages: int) -> None:
        before = self.cache.evictable_size()
        assert self.cache.evict(pages * self.page_size) >= min(before, pages * self.page_size)

    @rule(steps=st.integers(1, 3))
    def run(self, steps: int) -> None:
        self.slots.run(steps)

    @rule()
    def reset(self) -> None:
        evictable = self.cache.evictable_size()
        assert self.cache.reset() == evictable
        assert (self.cache.evictable_size(), self.cache.host_cached_size()) == (0, 0)
        self.inserted = {
            request.key[:end]
            for request in self.requests.values()
            for end in range(self.page_size, request.protected + 1, self.page_size)
        }

    @rule()
    def check_contents(self) -> None:
        """When all that was planned is done, every slot holds what the tree and the requests say."""
        self.slots.send(self.cache.take_copy_jobs(), [])
        self.slots.run(len(self.slots.queue))
        for request in self.requests.values():
            held = [self.slots.device[slot] for slot in request.slots.tolist()]
            assert held == self.contents(request.key, 0, len(request.key))
        for node, prefix in self.nodes():
            start = len(prefix) - len(node.key)
            expected = self.contents(prefix, start, len(prefix))
            if node.on_device:
                assert [self.slots.device[slot] for slot in node.values.tolist()] == expected
            if node.on_host:
                assert [self.slots.host[slot] for slot in node.host_values.tolist()] == expected

    def nodes(self) -> list[tuple[RadixNode, tuple]]:
        tree = self.cache._tree
        prefixes: dict[RadixNode, tuple] = {tree.root: ()}
        for node in tree.below(tree.root)[1:]:
            prefixes[node] = prefixes[node.parent] + tuple(node.key.tolist())
        return [(node, prefix) for node, prefix in prefixes.items() if node is not tree.root]

    @invariant()
    def tiers_are_sound(self) -> None:
        if not hasattr(self, "cache"):
            return
        tree = self.cache._tree
        nodes = self.nodes()
        for node, _ in nodes:
            assert node.on_device or node.on_host
            assert not node.on_device or node.parent is tree.root or node.parent.on_device
            assert node.device_children == sum(child.on_device for child in node.children.values())
            assert node.host_children == sum(child.on_host for child in node.children.values())
        device = [slot for node, _ in nodes for slot in node.values.tolist()]
        host = [slot for node, _ in nodes for slot in node.host_values.tolist()]
        assert len(set(device)) == len(device) == self.cache.evictable_size() + self.cache.protected_size()
        assert len(set(host)) == len(host) == self.cache.host_cached_size()
        size = self.page_size
        own = sum(-(-(len(request.key) - request.protected) // size) for request in self.requests.values()) * size
        assert self.allocator.available_size() + len(device) + own == self.allocator.size

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.check_contents()
        for request in self.requests.values():
            self.allocator.free(request.slots[request.protected :])
            self.cache.dec_lock_ref(request.node)
        self.cache.reset()
        assert self.allocator.available_size() == self.allocator.size
        assert self.host.available_size() == self.host.size
        assert not self.nodes()


class LargeHost(HiRadixMachine):
    """Nothing is ever lost."""

    host_pages = 5000


class WriteThrough(HiRadixMachine):
    write_policy = "write_through_selective"


class TinyHost(HiRadixMachine):
    host_pages = 2


TestSmallHost = HiRadixMachine.TestCase
TestLargeHost = LargeHost.TestCase
TestWriteThrough = WriteThrough.TestCase
TestTinyHost = TinyHost.TestCase
for case in (TestSmallHost, TestLargeHost, TestWriteThrough, TestTinyHost):
    case.settings = settings(max_examples=40, stateful_step_count=40, deadline=None, derandomize=True, database=None)


class Harness:
    def __init__(self, device: int = 8, host: int = 8, **settings: str) -> None:
        self.allocator = TokenToKVPoolAllocator(device, 1)
        self.host = TokenToKVPoolAllocator(host, 1)
        self.cache = HiRadixCache(self.allocator, self.host, **settings)

    def add(self, key: list[int]) -> None:
        slots = self.allocator.alloc_extend(0, len(key), -1)
        self.allocator.free(slots[: self.cache.insert(np.array(key), slots)])

    def where(self, key: list[int]) -> tuple[int, int]:
        match = self.cache.match_prefix(np.array(key), count_hit=False)
        return len(match.indices), match.host_len


def test_what_the_device_gives_up_goes_to_the_host_and_comes_back():
    harness = Harness()
    harness.add([1, 2, 3, 4])
    assert harness.cache.evict(1) == 4
    assert harness.where([1, 2, 3, 4]) == (0, 4)
    (out,) = harness.cache.take_copy_jobs()
    assert (out.direction, out.device_slots.tolist(), out.host_slots.tolist()) == (
        "to_host",
        [1, 2, 3, 4],
        [1, 2, 3, 4],
    )
    assert harness.allocator.available_size() == 8
    match = harness.cache.load_back(harness.cache.match_prefix(np.array([1, 2, 3, 9])))
    assert (len(match.indices), match.host_len) == (3, 0)
    (back,) = harness.cache.take_copy_jobs()
    assert (back.direction, back.host_slots.tolist()) == ("to_device", [1, 2, 3])
    assert back.device_slots.tolist() == match.indices.tolist()
    # it is still on the host: evicting it again copies nothing
    assert harness.cache.evict(8) == 3
    assert harness.cache.take_copy_jobs() == ()


def test_a_prefix_without_room_on_the_device_comes_back_in_part():
    harness = Harness(device=12)
    harness.add([1, 2, 3])
    harness.add([1, 2, 3, 4, 5, 6])
    harness.cache.evict(12)
    taken = harness.allocator.alloc_extend(0, 8, -1)
    match = harness.cache.load_back(harness.cache.match_prefix(np.array([1, 2, 3, 4, 5, 6])))
    assert (len(match.indices), match.host_len) == (3, 3)
    harness.allocator.free(taken)
    match = harness.cache.load_back(harness.cache.match_prefix(np.array([1, 2, 3, 4, 5, 6])))
    assert (len(match.indices), match.host_len) == (6, 0)


def test_a_full_host_forgets_in_the_order_of_the_policy():
    harness = Harness(host=4)
    harness.add([1, 2])
    harness.add([3, 4])
    harness.add([5, 6])
    harness.cache.evict(8)
    assert [harness.where(key) for key in ([1, 2], [3, 4], [5, 6])] == [(0, 0), (0, 2), (0, 2)]
    harness.add([7, 8, 9, 10, 11])  # more than the host holds
    harness.cache.evict(8)
    assert harness.where([7, 8, 9, 10, 11]) == (0, 0)
    assert harness.where([5, 6]) == (0, 2)


def test_what_is_loaded_back_is_not_given_up_for_what_goes():
    harness = Harness(device=4, host=4)
    harness.add([1, 2, 3])
    harness.cache.evict(4)
    harness.add([5, 6, 7, 8])  # the host has no room for it, unless it forgets what is to be loaded
    match = harness.cache.load_back(harness.cache.match_prefix(np.array([1, 2, 3])))
    assert (len(match.indices), match.host_len) == (3, 0)
    assert harness.where([5, 6, 7, 8]) == (0, 0)


def test_write_through_keeps_what_the_match_found_on_the_host():
    harness = Harness(device=8, host=3, write_policy="write_through_selective")
    harness.add([1, 2])
    for _ in range(2):
        harness.cache.match_prefix(np.array([1, 2]))
    harness.cache.evict(8)
    slots = harness.allocator.alloc_extend(0, 1, -1)
    harness.cache.insert(np.array([1]), slots)  # only the first token, again
    found = harness.cache.match_prefix(np.array([1, 2]))
    assert (len(found.indices), found.host_len) == (1, 1)
    assert len(harness.cache.load_back(found).indices) == 2


def test_what_is_computed_again_is_on_both_tiers():
    harness = Harness()
    harness.add([1, 2, 3])
    harness.cache.evict(8)
    harness.add([1, 2, 3, 4])
    assert harness.where([1, 2, 3, 4]) == (4, 0)
    assert harness.cache.host_cached_size() == 3
    harness.cache.take_copy_jobs()
    assert harness.cache.evict(8) == 4
    (job,) = harness.cache.take_copy_jobs()
    assert len(job.device_slots) == 1


def test_write_through_copies_what_was_hit():
    harness = Harness(write_policy="write_through_selective")
    harness.add([1, 2])
    harness.add([3, 4])
    harness.cache.match_prefix(np.array([1, 2]))
    assert harness.cache.take_copy_jobs() == ()
    harness.cache.match_prefix(np.array([1, 2]))
    (job,) = harness.cache.take_copy_jobs()
    assert (job.direction, job.device_slots.tolist()) == ("to_host", [1, 2])
    assert harness.cache.evict(8) == 4
    assert harness.cache.take_copy_jobs() == ()
    assert (harness.where([1, 2]), harness.where([3, 4])) == ((0, 2), (0, 0))


def test_pages_of_both_tiers_must_be_equal():
    with pytest.raises(ValueError, match="pages of 4 tokens on the host, of 2 on the device"):
        HiRadixCache(TokenToKVPoolAllocator(8, 2), TokenToKVPoolAllocator(8, 4))


def test_a_handle_of_what_the_host_forgot_is_refused():
    harness = Harness()
    harness.add([1, 2])
    harness.cache.evict(2)
    match = harness.cache.match_prefix(np.array([1, 2]))
    harness.cache.reset()
    with pytest.raises(EngineError, match="not cached any more"):
        harness.cache.load_back(match)
