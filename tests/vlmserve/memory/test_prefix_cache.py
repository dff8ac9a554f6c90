"""The prefix cache, with a host tier and without: against a model of all slots' contents, and where what is cached."""

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
from vlmserve.memory.radix_cache import RadixCache
from vlmserve.memory.radix_tree import RadixNode
from vlmserve_common.errors import EngineError

NUM_PAGES = 12


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
                for device, host in zip(job.device_slots.tolist(), job.host_slots.tolist(), strict=True):
                    if job.direction == "to_host":
                        self.host[host] = self.device[device]
                    else:
                        self.device[device] = self.host[host]
            self.device.update(computed)
        del self.queue[:steps]


@dataclass
class Request:
    """key: its namespace and its tokens. slots [:protected] are the tree's, the rest the request's own."""

    key: tuple
    slots: np.ndarray
    protected: int
    node: RadixNode


def tokens(key: tuple) -> np.ndarray:
    return np.array(key[1:], dtype=np.int64)


class CacheMachine(RuleBasedStateMachine):
    """Requests whose prompts are computed in a step of their own, sent when they start and run some time later.

    inserted: every prefix of whole pages that was ever cached; if there is no host tier, those that are cached now.
    """

    page_size = 2
    host_pages = 6
    write_policy = "write_back"

    def __init__(self) -> None:
        super().__init__()
        self.allocator = TokenToKVPoolAllocator(NUM_PAGES * self.page_size, self.page_size)
        self.host = TokenToKVPoolAllocator(max(1, self.host_pages) * self.page_size, self.page_size)
        self.slots = Slots()
        self.requests: dict[int, Request] = {}
        self.names = itertools.count()
        self.inserted: set[tuple] = set()

    @initialize(policy=st.sampled_from(["lru", "lfu", "fifo", "priority"]))
    def make(self, policy: str) -> None:
        self.cache = RadixCache(self.allocator, policy=policy)
        if self.host_pages:
            self.cache = HiRadixCache(self.allocator, self.host, policy=policy, write_policy=self.write_policy)

    def page(self, symbol: int) -> list[int]:
        """Pages 0 and 1 differ in the last token only; 2 is a picture's."""
        return [-5] * self.page_size if symbol == 2 else [7] * (self.page_size - 1) + [symbol]

    def draw_key(self, data: st.DataObject) -> tuple:
        symbols = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=5))
        tail = data.draw(st.integers(0, self.page_size - 1))
        like_a_page = np.array(self.page(0), dtype=np.int64).tobytes()
        namespace = data.draw(st.sampled_from([b"", b"", b"", like_a_page, b"x"]))
        return namespace, *(token for symbol in symbols for token in self.page(symbol)), *[7] * tail

    def contents(self, key: tuple, start: int, end: int) -> list[tuple]:
        return [key[: i + 2] for i in range(start, end)]

    def prefixes(self, key: tuple, end: int) -> list[tuple]:
        return [key[: at + 1] for at in range(self.page_size, end + 1, self.page_size)]

    def check_match(self, key: tuple, cached: int) -> None:
        known = [prefix for prefix in self.prefixes(key, len(key) - 1) if prefix in self.inserted]
        longest = max((len(prefix) - 1 for prefix in known), default=0)
        assert cached == longest if not 0 < self.host_pages < 1000 else cached <= longest

    def make_room(self, count: int) -> None:
        before = self.cache.evictable_size()
        freed = self.cache.evict(count)
        assert freed >= min(before, count)
        if not self.host_pages:
            gone = {key for key in self.inserted if self.cache.match_len(tokens(key), key[0]) < len(key) - 1}
            assert len(gone) * self.page_size == freed
            self.inserted -= gone

    @rule(data=st.data(), loads=st.booleans())
    def start(self, data: st.DataObject, loads: bool) -> None:
        self.begin(data, loads)

    def begin(self, data: st.DataObject, loads: bool) -> int | None:
        """A request's name, if it fits."""
        key = self.draw_key(data)
        namespace, array = key[0], tokens(key)
        expected = self.cache.match_len(array, namespace)
        found = self.cache.match_prefix(array, namespace)
        assert len(found.indices) + found.host_len == expected
        assert found.indices.tolist() == self.cache.match_slots(array, namespace).tolist()
        self.check_match(key, expected)
        match = self.cache.load_back(found) if loads else found
        assert len(found.indices) <= len(match.indices) <= expected
        assert match.indices[: len(found.indices)].tolist() == found.indices.tolist()
        assert len(match.indices) + match.host_len == expected
        cached = len(match.indices)
        self.cache.inc_lock_ref(match.last_node)
        own = np.empty(0, dtype=np.int64)
        if cached < len(array):
            self.make_room(self.allocator.tokens_needed(cached, len(array)) - self.allocator.available_size())
            own = self.allocator.alloc_extend(cached, len(array), int(match.indices[-1]) if cached else -1)
            if own is None:
                self.cache.dec_lock_ref(match.last_node)
                return None
        computed = list(zip(own.tolist(), self.contents(key, cached, len(array)), strict=True))
        self.slots.send(self.cache.take_copy_jobs(), computed)
        name = next(self.names)
        self.requests[name] = Request(key, np.concatenate([match.indices, own]), cached, match.last_node)
        return name

    @rule(data=st.data(), loads=st.booleans())
    def serve(self, data: st.DataObject, loads: bool) -> None:
        name = self.begin(data, loads)
        if name is not None:
            self.share(name, ends=True, priority=0)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), ends=st.booleans(), priority=st.integers(0, 1))
    def insert(self, data: st.DataObject, ends: bool, priority: int) -> None:
        """A request whose step was sent is shared, and ends or goes on."""
        self.share(data.draw(st.sampled_from(sorted(self.requests))), ends, priority)

    def share(self, name: int, ends: bool, priority: int) -> None:
        request = self.requests[name]
        namespace, array = request.key[0], tokens(request.key)
        full = len(array) // self.page_size * self.page_size
        already = self.cache.insert(array, request.slots, namespace, priority=priority)
        assert request.protected <= already <= full
        self.allocator.free(request.slots[request.protected : already])
        self.inserted.update(self.prefixes(request.key, full))
        match = self.cache.match_prefix(array, namespace, count_hit=False)
        assert (len(match.indices), match.host_len) == (full, 0)
        self.cache.inc_lock_ref(match.last_node)
        self.cache.dec_lock_ref(request.node)
        request.slots[:full], request.protected, request.node = match.indices, full, match.last_node
        if ends:
            self.drop(name)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        self.drop(data.draw(st.sampled_from(sorted(self.requests))))

    def drop(self, name: int) -> None:
        request = self.requests.pop(name)
        self.allocator.free(request.slots[request.protected :])
        self.cache.dec_lock_ref(request.node)

    @rule(pages=st.integers(1, 12))
    def evict(self, pages: int) -> None:
        self.make_room(pages * self.page_size)

    @rule(steps=st.integers(1, 3))
    def run(self, steps: int) -> None:
        self.slots.run(steps)

    @rule()
    def reset(self) -> None:
        evictable = self.cache.evictable_size()
        assert self.cache.reset() == evictable
        assert self.cache.evictable_size() == 0
        assert self.host.available_size() == self.host.size
        self.inserted = self.locked()

    def locked(self) -> set[tuple]:
        return {
            prefix for request in self.requests.values() for prefix in self.prefixes(request.key, request.protected)
        }

    @rule()
    def check_contents(self) -> None:
        """When all that was planned is done, every slot holds what the tree and the requests say."""
        self.slots.send(self.cache.take_copy_jobs(), [])
        self.slots.run(len(self.slots.queue))
        for request in self.requests.values():
            held = [self.slots.device[slot] for slot in request.slots.tolist()]
            assert held == self.contents(request.key, 0, len(request.key) - 1)
        for node, prefix in self.nodes():
            end = len(prefix) - 1
            expected = self.contents(prefix, end - len(node.key), end)
            if node.on_device:
                assert [self.slots.device[slot] for slot in node.values.tolist()] == expected
            if node.on_host:
                assert [self.slots.host[slot] for slot in node.host_values.tolist()] == expected

    def nodes(self) -> list[tuple[RadixNode, tuple]]:
        tree = self.cache._tree
        prefixes: dict[RadixNode, tuple] = {}
        for node in tree.below(tree.root)[1:]:
            before = prefixes[node.parent] if node.parent is not tree.root else (tree.namespace(node),)
            prefixes[node] = before + tuple(node.key.tolist())
        return list(prefixes.items())

    @invariant()
    def tiers_are_sound(self) -> None:
        if not hasattr(self, "cache"):
            return
        tree, size = self.cache._tree, self.page_size
        nodes = self.nodes()
        for node, _ in nodes:
            assert node.on_device or node.on_host
            assert not node.on_device or node.parent is tree.root or node.parent.on_device
            assert node.device_children == sum(child.on_device for child in node.children.values())
            assert node.host_children == sum(child.on_host for child in node.children.values())
        device = [slot for node, _ in nodes for slot in node.values.tolist()]
        host = [slot for node, _ in nodes for slot in node.host_values.tolist()]
        assert self.cache.protected_size() == len(self.locked()) * size
        assert len(set(device)) == len(device) == self.cache.evictable_size() + self.cache.protected_size()
        assert len(set(host)) == len(host) == self.host.size - self.host.available_size()
        assert self.cache.live_keys() == {token for _, key in nodes for token in key[1:] if token < 0}
        own = sum(-(-(len(tokens(one.key)) - one.protected) // size) for one in self.requests.values()) * size
        assert self.allocator.available_size() + len(device) + own == self.allocator.size

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.check_contents()
        for name in list(self.requests):
            self.drop(name)
        self.cache.reset()
        assert self.allocator.available_size() == self.allocator.size
        assert self.host.available_size() == self.host.size
        assert not self.nodes()


class DeviceOnly(CacheMachine):
    page_size = 1
    host_pages = 0


class LargePages(DeviceOnly):
    page_size = 16


class LargeHost(CacheMachine):
    """Nothing is ever lost."""

    host_pages = 5000


class WriteThrough(CacheMachine):
    write_policy = "write_through_selective"


class TinyHost(CacheMachine):
    host_pages = 2


TestDeviceOnly = DeviceOnly.TestCase
TestLargePages = LargePages.TestCase
TestSmallHost = CacheMachine.TestCase
TestLargeHost = LargeHost.TestCase
TestWriteThrough = WriteThrough.TestCase
TestTinyHost = TinyHost.TestCase
for case in (TestDeviceOnly, TestLargePages, TestSmallHost, TestLargeHost, TestWriteThrough, TestTinyHost):
    case.settings = settings(max_examples=40, stateful_step_count=40, deadline=None, derandomize=True, database=None)
del case


class Harness:
    """A cache whose requests come and go at once. host: slots of the host's tier; 0: none."""

    def __init__(self, device: int = 8, host: int = 8, **settings: str) -> None:
        self.allocator = TokenToKVPoolAllocator(device, 1)
        if host:
            self.cache = HiRadixCache(self.allocator, TokenToKVPoolAllocator(host, 1), **settings)
        else:
            self.cache = RadixCache(self.allocator, **settings)

    def add(self, key: list[int], priority: int = 0) -> None:
        slots = self.allocator.alloc_extend(0, len(key), -1)
        self.allocator.free(slots[: self.cache.insert(np.array(key), slots, priority=priority)])

    def match(self, key: list[int], *, count_hit: bool = True):
        return self.cache.match_prefix(np.array(key), count_hit=count_hit)

    def where(self, key: list[int]) -> tuple[int, int]:
        match = self.match(key, count_hit=False)
        return len(match.indices), match.host_len

    def order(self, *keys: list[int]) -> list[list[int]]:
        """In which order these leaves go. To look for them is not to use them."""
        left, gone = list(keys), []
        while left:
            assert self.cache.evict(1)
            gone += [key for key in left if self.cache.match_len(np.array(key)) < len(key)]
            left = [key for key in left if key not in gone]
        return gone


def test_the_policies_order():
    a, b, c = [1, 9], [2, 9], [3, 9]

    def order(policy: str) -> list[list[int]]:
        harness = Harness(host=0, policy=policy)
        for key, priority in ((a, 1), (b, 0), (c, 1)):
            harness.add(key, priority)
        for key in (a, a, b, c):
            harness.match(key)
        harness.match(b, count_hit=False)
        return harness.order(a, b, c)

    assert order("lru") == [a, c, b]
    assert order("lfu") == [c, b, a]
    assert order("fifo") == [a, b, c]
    assert order("priority") == [b, a, c]


def test_a_prefix_and_both_parts_of_a_split_one_have_the_highest_priority_of_those_who_inserted_it():
    harness = Harness(device=64, host=0, policy="priority")
    for key, priority in (([1, 2, 3], 0), ([4, 5, 6], 1), ([1, 2, 7], 2), ([1, 2, 7], -1)):
        harness.add(key, priority)
    assert harness.order([1, 2, 3], [4, 5, 6], [1, 2, 7]) == [[1, 2, 3], [4, 5, 6], [1, 2, 7]]
    assert harness.where([1, 2]) == (2, 0)
    harness.add([4, 5], priority=1)
    assert harness.order([1, 2], [4, 5]) == [[4, 5], [1, 2]]


def test_handles_that_are_misused():
    harness = Harness()
    harness.add([1, 2])
    match = harness.match([1, 2])
    with pytest.raises(EngineError, match="unlocked"):
        harness.cache.dec_lock_ref(match.last_node)
    harness.cache.evict(2)
    on_host = harness.match([1, 2])
    harness.cache.reset()
    with pytest.raises(EngineError, match="not cached any more"):
        harness.cache.inc_lock_ref(match.last_node)
    with pytest.raises(EngineError, match="not cached any more"):
        harness.cache.load_back(on_host)


def test_what_the_device_gives_up_goes_to_the_host_and_comes_back():
    harness = Harness()
    harness.add([1, 2, 3, 4])
    assert harness.cache.evict(1) == 4
    assert harness.where([1, 2, 3, 4]) == (0, 4)
    (out,) = harness.cache.take_copy_jobs()
    assert out.direction == "to_host"
    assert out.device_slots.tolist() == out.host_slots.tolist() == [1, 2, 3, 4]
    match = harness.cache.load_back(harness.match([1, 2, 3, 9]))
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
    match = harness.cache.load_back(harness.match([1, 2, 3, 4, 5, 6]))
    assert (len(match.indices), match.host_len) == (3, 3)
    harness.allocator.free(taken)
    match = harness.cache.load_back(harness.match([1, 2, 3, 4, 5, 6]))
    assert (len(match.indices), match.host_len) == (6, 0)


def test_a_full_host_forgets_in_the_order_of_the_policy():
    harness = Harness(host=4)
    for key in ([1, 2], [3, 4], [5, 6]):
        harness.add(key)
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
    match = harness.cache.load_back(harness.match([1, 2, 3]))
    assert (len(match.indices), match.host_len) == (3, 0)
    assert harness.where([5, 6, 7, 8]) == (0, 0)


def test_write_through_keeps_what_the_match_found_on_the_host():
    harness = Harness(device=8, host=3, write_policy="write_through_selective")
    harness.add([1, 2])
    for _ in range(2):
        harness.match([1, 2])
    harness.cache.evict(8)
    harness.add([1])
    found = harness.match([1, 2])
    assert (len(found.indices), found.host_len) == (1, 1)
    assert len(harness.cache.load_back(found).indices) == 2


def test_write_through_copies_what_was_hit():
    harness = Harness(write_policy="write_through_selective")
    harness.add([1, 2])
    harness.add([3, 4])
    harness.match([1, 2])
    assert harness.cache.take_copy_jobs() == ()
    harness.match([1, 2])
    (job,) = harness.cache.take_copy_jobs()
    assert (job.direction, job.device_slots.tolist()) == ("to_host", [1, 2])
    assert harness.cache.evict(8) == 4
    assert harness.cache.take_copy_jobs() == ()
    assert (harness.where([1, 2]), harness.where([3, 4])) == ((0, 2), (0, 0))
