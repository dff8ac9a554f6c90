"""The prefix cache: against a naive model, and one by one what the model does not say."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vlmserve.memory.allocator import TokenToKVPoolAllocator
from vlmserve.memory.prefix_cache import ChunkCache
from vlmserve.memory.radix_cache import RadixCache
from vlmserve.memory.radix_tree import RadixNode
from vlmserve_common.errors import EngineError

NUM_PAGES = 20


def total_size(cache: RadixCache) -> int:
    return cache.evictable_size() + cache.protected_size()


@dataclass
class Request:
    """slots [:protected] are the tree's, the rest the request's own."""

    namespace: bytes
    key: np.ndarray
    slots: np.ndarray
    protected: int
    node: RadixNode


class RadixMachine(RuleBasedStateMachine):
    """Requests as a scheduler runs them. The model: every cached page-aligned prefix -> slots of its last page.

    A key in the model begins with its namespace.
    """

    page_size = 1
    policy = "lru"

    def __init__(self):
        super().__init__()
        self.allocator = TokenToKVPoolAllocator(NUM_PAGES * self.page_size, self.page_size)
        self.cache = RadixCache(self.allocator, policy=self.policy)
        self.model: dict[tuple, tuple[int, ...]] = {}
        self.requests: dict[int, Request] = {}
        self.names = itertools.count()

    def page(self, symbol: int) -> list[int]:
        """Pages 0, 1 and 2 differ in the last token only; 3 is a picture's."""
        return [-5] * self.page_size if symbol == 3 else [7] * (self.page_size - 1) + [symbol]

    def draw_key(self, data) -> tuple[bytes, np.ndarray]:
        symbols = data.draw(st.lists(st.integers(0, 3), max_size=6))
        tail = data.draw(st.integers(0, self.page_size - 1))
        key = np.array([token for symbol in symbols for token in self.page(symbol)] + [7] * tail, dtype=np.int64)
        # the second looks like a first page
        return data.draw(st.sampled_from([b"", np.array(self.page(0), dtype=np.int64).tobytes(), b"x"])), key

    def prefixes(self, namespace: bytes, key: np.ndarray) -> list[tuple]:
        ends = range(self.page_size, len(key) + 1, self.page_size)
        return [(namespace, *key[:end].tolist()) for end in ends]

    def modelled(self, namespace: bytes, key: np.ndarray) -> list[int]:
        """Slots of the cached prefix, by the model."""
        slots: list[int] = []
        for prefix in self.prefixes(namespace, key):
            if prefix not in self.model:
                break
            slots.extend(self.model[prefix])
        return slots

    def learn(self, request: Request) -> None:
        for i, prefix in enumerate(self.prefixes(request.namespace, request.key)):
            pages = request.slots[i * self.page_size : (i + 1) * self.page_size]
            self.model.setdefault(prefix, tuple(pages.tolist()))

    def evict(self, tokens: int) -> None:
        before = self.cache.evictable_size()
        freed = self.cache.evict(tokens)
        assert freed >= min(tokens, before)
        assert freed % self.page_size == 0
        gone = [
            prefix for prefix in self.model if self.cache.match_len(np.array(prefix[1:]), prefix[0]) < len(prefix) - 1
        ]
        assert len(gone) * self.page_size == freed
        for prefix in gone:
            del self.model[prefix]

    @rule(data=st.data())
    def match(self, data):
        namespace, key = self.draw_key(data)
        expected = self.modelled(namespace, key)
        assert self.cache.match_len(key, namespace) == len(expected)
        result = self.cache.match_prefix(key, namespace)
        assert (result.host_len, result.last_host_node) == (0, result.last_node)
        assert result.indices.dtype == np.int64
        assert result.indices.tolist() == expected

    @rule(data=st.data())
    def start(self, data):
        namespace, key = self.draw_key(data)
        match = self.cache.match_prefix(key, namespace)
        self.cache.inc_lock_ref(match.last_node)
        cached = len(match.indices)
        slots = match.indices
        if cached < len(key):
            needed = self.allocator.tokens_needed(cached, len(key))
            if needed > self.allocator.available_size():
                self.evict(needed - self.allocator.available_size())
            own = self.allocator.alloc_extend(cached, len(key), int(slots[-1]) if cached else -1)
            if own is None:
                self.cache.dec_lock_ref(match.last_node)
                return
            slots = np.concatenate([slots, own])
        self.requests[next(self.names)] = Request(namespace, key, slots, cached, match.last_node)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def share(self, data):
        """A computed prompt goes into the tree while its request goes on."""
        request = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        cached = len(self.modelled(request.namespace, request.key))
        already = self.cache.insert(
            request.key, request.slots, request.namespace, priority=data.draw(st.integers(-1, 1))
        )
        assert already == cached >= request.protected
        self.learn(request)
        self.allocator.free(request.slots[request.protected : already])
        match = self.cache.match_prefix(request.key, request.namespace, count_hit=False)
        self.cache.inc_lock_ref(match.last_node)
        self.cache.dec_lock_ref(request.node)
        request.protected, request.node = len(match.indices), match.last_node
        assert request.protected == len(request.key) // self.page_size * self.page_size
        request.slots[: request.protected] = match.indices

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data):
        request = self.requests.pop(data.draw(st.sampled_from(sorted(self.requests))))
        full = len(request.key) // self.page_size * self.page_size
        already = self.cache.insert(request.key, request.slots, request.namespace)
        assert already == len(self.modelled(request.namespace, request.key))
        self.learn(request)
        self.allocator.free(request.slots[request.protected : already])
        self.allocator.free(request.slots[full:])
        self.cache.dec_lock_ref(request.node)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def drop(self, data):
        request = self.requests.pop(data.draw(st.sampled_from(sorted(self.requests))))
        self.allocator.free(request.slots[request.protected :])
        self.cache.dec_lock_ref(request.node)

    @rule(pages=st.integers(0, 8))
    def evict_some(self, pages):
        self.evict(pages * self.page_size)

    @rule()
    def reset(self):
        evictable = self.cache.evictable_size()
        assert self.cache.reset() == evictable
        assert self.cache.evictable_size() == 0
        locked = self.locked()
        self.model = {prefix: slots for prefix, slots in self.model.items() if prefix in locked}

    def locked(self) -> set[tuple]:
        return {
            prefix
            for request in self.requests.values()
            for prefix in self.prefixes(request.namespace, request.key[: request.protected])
        }

    @invariant()
    def equals_the_model(self):
        size = self.page_size
        assert total_size(self.cache) == len(self.model) * size
        assert self.cache.protected_size() == len(self.locked()) * size
        held = sum(-(-(len(request.key) - request.protected) // size) for request in self.requests.values()) * size
        assert self.allocator.available_size() + total_size(self.cache) + held == self.allocator.size
        negative = {token for key in self.model for token in key[1:] if token < 0}
        assert self.cache.live_keys() == negative
        for request in self.requests.values():
            cached = self.modelled(request.namespace, request.key[: request.protected])
            assert cached == request.slots[: request.protected].tolist()

    def teardown(self):
        for request in self.requests.values():
            self.allocator.free(request.slots[request.protected :])
            self.cache.dec_lock_ref(request.node)
        self.cache.reset()
        assert total_size(self.cache) == 0
        assert self.allocator.available_size() == self.allocator.size


class LfuMachine4(RadixMachine):
    page_size = 4
    policy = "lfu"


class PriorityMachine16(RadixMachine):
    page_size = 16
    policy = "priority"


TestLru1 = RadixMachine.TestCase
TestLfu4 = LfuMachine4.TestCase
TestPriority16 = PriorityMachine16.TestCase
for case in (TestLru1, TestLfu4, TestPriority16):
    case.settings = settings(max_examples=50, stateful_step_count=30, deadline=None, derandomize=True, database=None)


class Harness:
    """A cache whose requests come and go at once."""

    def __init__(self, size: int = 64, page_size: int = 1, policy: str = "lru"):
        self.allocator = TokenToKVPoolAllocator(size, page_size)
        self.cache = RadixCache(self.allocator, policy=policy)

    def add(self, key: list[int], namespace: bytes = b"", priority: int = 0) -> int:
        slots = self.allocator.alloc_extend(0, len(key), -1)
        already = self.cache.insert(np.array(key), slots, namespace, priority=priority)
        self.allocator.free(slots[:already])
        return already

    def cached(self, key: list[int], namespace: bytes = b"") -> int:
        return self.cache.match_len(np.array(key), namespace)

    def order(self, *keys: list[int]) -> list[list[int]]:
        """In which order these leaves go."""
        left, gone = list(keys), []
        while left:
            assert self.cache.evict(1)
            gone += [key for key in left if self.cached(key) < len(key)]
            left = [key for key in left if key not in gone]
        return gone


def test_the_least_recently_used_leaf_goes_first():
    harness = Harness()
    for first in (1, 2, 3):
        harness.add([first, 10, 11])
    harness.cache.match_prefix(np.array([1, 10, 11]))
    assert harness.cache.evict(1) == 3
    assert [harness.cached([first, 10, 11]) for first in (1, 2, 3)] == [3, 0, 3]
    harness.add([3, 10, 11])  # to insert what is there is to use it
    assert harness.cache.evict(2) == 3
    assert [harness.cached([first, 10, 11]) for first in (1, 2, 3)] == [0, 0, 3]


def test_the_policies_order():
    a, b, c = [1, 9], [2, 9], [3, 9]

    def order(policy: str) -> list[list[int]]:
        harness = Harness(policy=policy)
        harness.add(a, priority=1)
        harness.add(b, priority=0)
        harness.add(c, priority=1)
        for key in (a, a, b, c):
            harness.cache.match_prefix(np.array(key))
        harness.cache.match_prefix(np.array(b), count_hit=False)
        return harness.order(a, b, c)

    assert order("lru") == [a, c, b]
    assert order("lfu") == [c, b, a]
    assert order("fifo") == [a, b, c]
    assert order("priority") == [b, a, c]
    with pytest.raises(ValueError, match=r"no eviction policy 'random', only lru, .* \(--radix-eviction-policy\)"):
        order("random")


def test_a_prefix_has_the_highest_priority_of_those_who_inserted_it():
    harness = Harness(policy="priority")
    harness.add([1, 2, 3], priority=0)
    harness.add([4, 5, 6], priority=1)
    harness.add([1, 2, 7], priority=2)
    harness.add([1, 2, 7], priority=-1)
    assert harness.order([1, 2, 3], [4, 5, 6], [1, 2, 7]) == [[1, 2, 3], [4, 5, 6], [1, 2, 7]]
    assert harness.cached([1, 2]) == 2
    harness.add([1, 2, 8], priority=-1)
    harness.add([4, 5], priority=1)
    assert harness.order([1, 2, 8]) == [[1, 2, 8]]
    assert harness.order([1, 2], [4, 5]) == [[4, 5], [1, 2]]


def test_both_parts_of_a_split_prefix_have_its_priority():
    harness = Harness(policy="priority")
    harness.add([1, 2, 3], priority=5)
    harness.cache.match_prefix(np.array([1, 2]))
    assert harness.cache.evict(1) == 1
    harness.add([4, 5], priority=1)
    assert harness.order([1, 2], [4, 5]) == [[4, 5], [1, 2]]


def test_namespaces_share_nothing_and_leave_nothing():
    harness = Harness()
    assert harness.add([1, 2, 3], b"a") == 0
    assert harness.add([1, 2, 3], b"b") == 0
    assert harness.add([1, 2, 4], b"b") == 2
    assert [harness.cached([1, 2, 3], space) for space in (b"", b"a", b"b", b"ab")] == [0, 3, 3, 0]
    assert harness.cache.match_prefix(np.array([1, 2, 3]), b"c").indices.tolist() == []
    harness.cache.reset()
    assert harness.cache._tree.below(harness.cache._tree.root) == [harness.cache._tree.root]


def test_no_cache_shares_nothing():
    cache = ChunkCache(4)
    assert (cache.page_size, cache.shares) == (4, False)
    key = np.arange(8)
    assert cache.insert(key, np.arange(4, 12)) == 0
    match = cache.load_back(cache.match_prefix(key))
    assert (match.indices.tolist(), match.host_len) == ([], 0)
    cache.inc_lock_ref(match.last_node)
    cache.dec_lock_ref(match.last_node)
    assert (cache.match_len(key), cache.evictable_size(), cache.protected_size()) == (0, 0, 0)
    assert (cache.evict(8), cache.reset(), cache.live_keys(), cache.take_copy_jobs()) == (0, 0, set(), ())


def test_looking_at_a_length_is_not_use():
    harness = Harness()
    harness.add([1, 2])
    harness.add([3, 4])
    harness.cached([1, 2])
    harness.cache.evict(1)
    assert (harness.cached([1, 2]), harness.cached([3, 4])) == (0, 2)


def test_a_handle_means_its_whole_prefix_after_splits():
    harness = Harness()
    harness.add([1, 2, 3, 4])
    handle = harness.cache.match_prefix(np.array([1, 2, 3, 4])).last_node
    harness.cache.inc_lock_ref(handle)
    harness.add([1, 2, 9])
    harness.cache.match_prefix(np.array([1, 2, 3]))
    assert (harness.cache.protected_size(), harness.cache.evictable_size()) == (4, 1)
    harness.cache.evict(100)
    assert harness.cached([1, 2, 3, 4]) == 4
    harness.cache.dec_lock_ref(handle)
    assert harness.cache.reset() == 4


def test_locks_are_counted():
    harness = Harness()
    harness.add([1, 2])
    handle = harness.cache.match_prefix(np.array([1, 2])).last_node
    harness.cache.inc_lock_ref(handle)
    harness.cache.inc_lock_ref(handle)
    harness.cache.dec_lock_ref(handle)
    assert harness.cache.evict(2) == 0
    harness.cache.dec_lock_ref(handle)
    with pytest.raises(EngineError, match="unlocked"):
        harness.cache.dec_lock_ref(handle)
    assert harness.cache.evictable_size() == 2
    assert harness.cache.evict(2) == 2
    with pytest.raises(EngineError, match="not cached any more"):
        harness.cache.inc_lock_ref(handle)
    assert harness.cache.protected_size() == 0


def test_the_tree_keeps_copies():
    harness = Harness()
    key, slots = np.array([1, 2, 3]), harness.allocator.alloc_extend(0, 3, -1)
    harness.cache.insert(key, slots)
    expected = slots.tolist()
    key[:] = 0
    slots[:] = 0
    match = harness.cache.match_prefix(np.array([1, 2, 3]))
    match.indices[:] = 0
    assert harness.cache.match_prefix(np.array([1, 2, 3])).indices.tolist() == expected


def test_other_integer_types_are_the_same_key():
    harness = Harness()
    harness.add([1, 2, 3])
    assert harness.cache.match_len(np.array([1, 2, 3], dtype=np.int32)) == 3


def test_slots_that_are_not_pages_are_refused():
    harness = Harness(page_size=4)
    harness.allocator.alloc_extend(0, 64, -1)
    for slots in ([5, 6, 7, 8], [4, 5, 7, 6], [4, 5, 6]):
        with pytest.raises(ValueError, match="slots"):
            harness.cache.insert(np.arange(4), np.array(slots))
    assert total_size(harness.cache) == 0
