"""The prefix cache: against a naive model, and one by one what the model does not say."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vlmserve.memory.allocator import TokenToKVPoolAllocator
from vlmserve.memory.radix_cache import RadixCache, RadixNode
from vlmserve_common.errors import EngineError

NUM_PAGES = 20


def total_size(cache: RadixCache) -> int:
    return cache.evictable_size() + cache.protected_size()


@dataclass
class Request:
    """slots [:protected] are the tree's, the rest the request's own."""

    key: np.ndarray
    slots: np.ndarray
    protected: int
    node: RadixNode


class RadixMachine(RuleBasedStateMachine):
    """Requests as a scheduler runs them. The model: every cached page-aligned prefix -> slots of its last page."""

    page_size = 1

    def __init__(self):
        super().__init__()
        self.allocator = TokenToKVPoolAllocator(NUM_PAGES * self.page_size, self.page_size)
        self.cache = RadixCache(self.allocator)
        self.model: dict[tuple, tuple[int, ...]] = {}
        self.requests: dict[int, Request] = {}
        self.names = itertools.count()

    def page(self, symbol: int) -> list[int]:
        """Pages 0, 1 and 2 differ in the last token only; 3 is a picture's."""
        return [-5] * self.page_size if symbol == 3 else [7] * (self.page_size - 1) + [symbol]

    def draw_key(self, data) -> np.ndarray:
        symbols = data.draw(st.lists(st.integers(0, 3), max_size=6))
        tail = data.draw(st.integers(0, self.page_size - 1))
        return np.array([token for symbol in symbols for token in self.page(symbol)] + [7] * tail, dtype=np.int64)

    def prefixes(self, key: np.ndarray) -> list[tuple]:
        ends = range(self.page_size, len(key) + 1, self.page_size)
        return [tuple(key[:end].tolist()) for end in ends]

    def modelled(self, key: np.ndarray) -> list[int]:
        """Slots of the cached prefix, by the model."""
        slots: list[int] = []
        for prefix in self.prefixes(key):
            if prefix not in self.model:
                break
            slots.extend(self.model[prefix])
        return slots

    def learn(self, request: Request) -> None:
        for i, prefix in enumerate(self.prefixes(request.key)):
            pages = request.slots[i * self.page_size : (i + 1) * self.page_size]
            self.model.setdefault(prefix, tuple(pages.tolist()))

    def evict(self, tokens: int) -> None:
        before = self.cache.evictable_size()
        freed = self.cache.evict(tokens)
        assert freed >= min(tokens, before)
        assert freed % self.page_size == 0
        gone = [prefix for prefix in self.model if self.cache.match_len(np.array(prefix)) < len(prefix)]
        assert len(gone) * self.page_size == freed
        for prefix in gone:
            del self.model[prefix]

    @rule(data=st.data())
    def match(self, data):
        key = self.draw_key(data)
        expected = self.modelled(key)
        assert self.cache.match_len(key) == len(expected)
        result = self.cache.match_prefix(key)
        assert result.indices.dtype == np.int64
        assert result.indices.tolist() == expected

    @rule(data=st.data())
    def start(self, data):
        key = self.draw_key(data)
        match = self.cache.match_prefix(key)
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
        self.requests[next(self.names)] = Request(key, slots, cached, match.last_node)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def share(self, data):
        """A computed prompt goes into the tree while its request goes on."""
        request = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        cached = len(self.modelled(request.key))
        already = self.cache.insert(request.key, request.slots)
        assert already == cached >= request.protected
        self.learn(request)
        self.allocator.free(request.slots[request.protected : already])
        match = self.cache.match_prefix(request.key)
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
        already = self.cache.insert(request.key, request.slots)
        assert already == len(self.modelled(request.key))
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
            prefix for request in self.requests.values() for prefix in self.prefixes(request.key[: request.protected])
        }

    @invariant()
    def equals_the_model(self):
        size = self.page_size
        assert total_size(self.cache) == len(self.model) * size
        assert self.cache.protected_size() == len(self.locked()) * size
        held = sum(-(-(len(request.key) - request.protected) // size) for request in self.requests.values()) * size
        assert self.allocator.available_size() + total_size(self.cache) + held == self.allocator.size
        negative = {token for key in self.model for token in key if token < 0}
        assert self.cache.live_keys() == negative
        for request in self.requests.values():
            assert self.modelled(request.key[: request.protected]) == (request.slots[: request.protected].tolist())

    def teardown(self):
        for request in self.requests.values():
            self.allocator.free(request.slots[request.protected :])
            self.cache.dec_lock_ref(request.node)
        self.cache.reset()
        assert total_size(self.cache) == 0
        assert self.allocator.available_size() == self.allocator.size


class RadixMachine4(RadixMachine):
    page_size = 4


class RadixMachine16(RadixMachine):
    page_size = 16


TestRadix1 = RadixMachine.TestCase
TestRadix4 = RadixMachine4.TestCase
TestRadix16 = RadixMachine16.TestCase
for case in (TestRadix1, TestRadix4, TestRadix16):
    case.settings = settings(max_examples=70, stateful_step_count=30, deadline=None, derandomize=True, database=None)


class Harness:
    """A cache whose requests come and go at once."""

    def __init__(self, size: int = 64, page_size: int = 1):
        self.allocator = TokenToKVPoolAllocator(size, page_size)
        self.cache = RadixCache(self.allocator)

    def add(self, key: list[int]) -> int:
        slots = self.allocator.alloc_extend(0, len(key), -1)
        already = self.cache.insert(np.array(key), slots)
        self.allocator.free(slots[:already])
        return already

    def cached(self, key: list[int]) -> int:
        return self.cache.match_len(np.array(key))


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


def test_looking_at_a_length_is_not_use():
    harness = Harness()
    harness.add([1, 2])
    harness.add([3, 4])
    harness.cached([1, 2])
    harness.cache.evict(1)
    assert (harness.cached([1, 2]), harness.cached([3, 4])) == (0, 2)


def test_a_shared_prefix_outlives_its_branches():
    harness = Harness()
    harness.add([1, 2, 3, 4])
    harness.add([1, 2, 5, 6])
    assert harness.cache.evict(2) == 2
    assert harness.cached([1, 2, 3, 4]) == 2
    assert harness.cache.evict(2) == 2
    assert harness.cached([1, 2, 5, 6]) == 2
    assert harness.cache.evict(100) == 2
    assert harness.allocator.available_size() == 64


def test_a_node_matched_in_part_does_not_lead_to_its_children():
    harness = Harness()
    harness.add([1, 2, 3, 4, 5])
    harness.add([1, 2, 3, 4, 6])
    assert (harness.cached([1, 2, 5]), harness.cached([1, 2, 6])) == (2, 2)
    assert len(harness.cache.match_prefix(np.array([1, 2, 5])).indices) == 2


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


def test_nothing_matched_can_be_locked():
    harness = Harness()
    handle = harness.cache.match_prefix(np.array([1])).last_node
    harness.cache.inc_lock_ref(handle)
    harness.cache.dec_lock_ref(handle)
    assert total_size(harness.cache) == 0


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


def test_many_entries_and_a_long_one():
    harness = Harness(size=60_000)
    for first in range(2000):
        harness.add([first, *range(5000, 5010)])
    harness.add(list(range(3000, 33_000)))
    assert harness.cached(list(range(3000, 33_000))) == 30_000
    assert harness.cache.evict(11 * 1990) == 11 * 1990
    assert [harness.cached([first, *range(5000, 5010)]) for first in (1989, 1990, 1999)] == [0, 11, 11]
    harness.cache.reset()
    assert harness.allocator.available_size() == 60_000
