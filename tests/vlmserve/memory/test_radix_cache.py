"""The prefix caches: against a naive model, and one by one what the model does not say."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vlmserve.memory.allocator import TokenToKVPoolAllocator
from vlmserve.memory.base_prefix_cache import PrefixNode
from vlmserve.memory.chunk_cache import ChunkCache
from vlmserve.memory.radix_cache import RadixCache
from vlmserve_common.errors import EngineError

NUM_PAGES = 20
NAMESPACES = st.sampled_from(["", "lora-a"])


@dataclass
class Request:
    """slots [:protected] are the tree's, the rest the request's own."""

    key: np.ndarray
    namespace: str
    slots: np.ndarray
    protected: int
    node: PrefixNode


class RadixMachine(RuleBasedStateMachine):
    """Requests as a scheduler runs them. The model: every cached page-aligned prefix -> slots of its last page."""

    page_size = 1

    def __init__(self):
        super().__init__()
        self.allocator = TokenToKVPoolAllocator(NUM_PAGES * self.page_size, self.page_size)
        self.cache = RadixCache(self.allocator, self.page_size)
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

    def prefixes(self, key: np.ndarray, namespace: str) -> list[tuple]:
        ends = range(self.page_size, len(key) + 1, self.page_size)
        return [(namespace, tuple(key[:end].tolist())) for end in ends]

    def modelled(self, key: np.ndarray, namespace: str) -> list[int]:
        """Slots of the cached prefix, by the model."""
        slots: list[int] = []
        for prefix in self.prefixes(key, namespace):
            if prefix not in self.model:
                break
            slots.extend(self.model[prefix])
        return slots

    def learn(self, request: Request) -> None:
        for i, prefix in enumerate(self.prefixes(request.key, request.namespace)):
            pages = request.slots[i * self.page_size : (i + 1) * self.page_size]
            self.model.setdefault(prefix, tuple(pages.tolist()))

    def evict(self, tokens: int) -> None:
        before = self.cache.evictable_size()
        freed = self.cache.evict(tokens)
        assert freed >= min(tokens, before)
        assert freed % self.page_size == 0
        gone = [
            prefix for prefix in self.model if self.cache.match_len(np.array(prefix[1]), prefix[0]) < len(prefix[1])
        ]
        assert len(gone) * self.page_size == freed
        for prefix in gone:
            del self.model[prefix]

    @rule(data=st.data(), namespace=NAMESPACES)
    def match(self, data, namespace):
        key = self.draw_key(data)
        expected = self.modelled(key, namespace)
        assert self.cache.match_len(key, namespace) == len(expected)
        result = self.cache.match_prefix(key, namespace)
        assert result.indices.dtype == np.int64
        assert result.indices.tolist() == expected

    @rule(data=st.data(), namespace=NAMESPACES)
    def start(self, data, namespace):
        key = self.draw_key(data)
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
        self.requests[next(self.names)] = Request(key, namespace, slots, cached, match.last_node)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def share(self, data):
        """A computed prompt goes into the tree while its request goes on."""
        request = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        cached = len(self.modelled(request.key, request.namespace))
        already = self.cache.insert(request.key, request.slots, request.namespace)
        assert already == cached >= request.protected
        self.learn(request)
        self.allocator.free(request.slots[request.protected : already])
        match = self.cache.match_prefix(request.key, request.namespace)
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
        assert already == len(self.modelled(request.key, request.namespace))
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
            for prefix in self.prefixes(request.key[: request.protected], request.namespace)
        }

    @invariant()
    def equals_the_model(self):
        size = self.page_size
        assert self.cache.total_size() == len(self.model) * size
        assert self.cache.protected_size() == len(self.locked()) * size
        held = sum(-(-(len(request.key) - request.protected) // size) for request in self.requests.values()) * size
        assert self.allocator.available_size() + self.cache.total_size() + held == self.allocator.size
        negative = {token for _, key in self.model for token in key if token < 0}
        assert self.cache.live_keys() == negative
        for request in self.requests.values():
            assert self.modelled(request.key[: request.protected], request.namespace) == (
                request.slots[: request.protected].tolist()
            )

    def teardown(self):
        for request in self.requests.values():
            self.allocator.free(request.slots[request.protected :])
            self.cache.dec_lock_ref(request.node)
        self.cache.reset()
        assert self.cache.total_size() == 0
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

    def __init__(self, size: int = 64, page_size: int = 1, **options):
        self.allocator = TokenToKVPoolAllocator(size, page_size)
        self.cache = RadixCache(self.allocator, page_size, **options)

    def add(self, key: list[int], namespace: str = "") -> int:
        slots = self.allocator.alloc_extend(0, len(key), -1)
        already = self.cache.insert(np.array(key), slots, namespace)
        self.allocator.free(slots[:already])
        return already

    def cached(self, key: list[int], namespace: str = "") -> int:
        return self.cache.match_len(np.array(key), namespace)


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


def test_at_equal_times_what_came_first_goes_first():
    harness = Harness(clock=lambda: 0.0)
    for first in (1, 2, 3):
        harness.add([first])
    harness.cache.match_prefix(np.array([1]))
    harness.cache.evict(1)
    assert [harness.cached([first]) for first in (1, 2, 3)] == [0, 1, 1]


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
    assert harness.cache.total_size() == 0


def test_namespaces_share_nothing():
    harness = Harness()
    harness.add([1, 2, 3])
    assert harness.cached([1, 2, 3], "tenant") == 0
    assert harness.add([1, 2, 3], "tenant") == 0
    assert harness.cache.total_size() == 6
    ours, theirs = (harness.cache.match_prefix(np.array([1, 2, 3]), name).indices for name in ("", "tenant"))
    assert not set(ours.tolist()) & set(theirs.tolist())


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
    assert harness.cache.total_size() == 0


def test_settings_that_do_not_fit_are_refused():
    allocator = TokenToKVPoolAllocator(64, 16)
    with pytest.raises(ValueError, match="pages of 1"):
        RadixCache(allocator, 1)
    with pytest.raises(ValueError, match="'mru'"):
        RadixCache(allocator, 16, eviction_policy="mru")


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


def test_chunk_cache_owns_nothing():
    cache = ChunkCache(page_size=4)
    key = np.arange(10)
    match = cache.match_prefix(key)
    assert match.indices.tolist() == []
    cache.inc_lock_ref(match.last_node)
    assert cache.insert(key, key) == 8  # "all there already": by the interface's rule the caller frees everything
    assert cache.match_len(key) == 0
    cache.dec_lock_ref(match.last_node)
    assert (cache.evict(5), cache.reset(), cache.total_size(), cache.live_keys()) == (0, 0, 0, set())
    assert cache.disabled
    assert not Harness().cache.disabled
