"""The KV slot allocator: against a naive model, and where it places what; and the device's table of slots."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vlmserve.memory.allocator import TokenToKVPoolAllocator
from vlmserve.memory.req_to_token import ReqToTokenPool
from vlmserve_common.errors import EngineError

NUM_PAGES = 24


def num_runs(slots: np.ndarray) -> int:
    return 1 + int((np.diff(slots) != 1).sum())


class AllocatorMachine(RuleBasedStateMachine):
    """Requests that start, grow and end; the model is the set of held pages and each request's slots."""

    page_size = 1

    def __init__(self):
        super().__init__()
        self.allocator = TokenToKVPoolAllocator(NUM_PAGES * self.page_size, self.page_size)
        self.requests: dict[int, np.ndarray] = {}
        self.names = itertools.count()

    @property
    def held(self) -> set[int]:
        return {page for slots in self.requests.values() for page in (slots // self.page_size).tolist()}

    def free_runs(self) -> list[int]:
        """Lengths of the maximal runs of pages that no request holds."""
        flags = [page in self.held for page in range(1, NUM_PAGES + 1)]
        return [len(list(run)) for held, run in itertools.groupby(flags) if not held]

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    @rule(tokens=st.integers(1, 150), room=st.integers(0, 200))
    def start(self, tokens, room):
        tokens = min(tokens, 12 * self.page_size)
        held, runs = self.held, self.free_runs()
        assert self.allocator.pages_needed(0, tokens) == self.pages(tokens)
        slots = self.allocator.alloc_extend(0, tokens, -1, room)
        if self.pages(tokens) > sum(runs):
            assert slots is None
            return
        assert slots is not None
        assert held.isdisjoint((slots // self.page_size).tolist())
        # one run whenever a gap is long enough, whatever rooms lie in it
        assert self.pages(tokens) > max(runs) or num_runs(slots) == 1
        self.requests[next(self.names)] = self.checked(slots, tokens)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), tokens=st.integers(1, 40), room=st.integers(0, 100))
    def extend(self, data, tokens, room):
        name = data.draw(st.sampled_from(sorted(self.requests)))
        old, held = self.requests[name], self.held
        length, last = len(old) + tokens, int(old[-1])
        need = self.pages(length) - self.pages(len(old))
        assert self.allocator.tokens_needed(len(old), length) == need * self.page_size
        available = self.allocator.available_size()
        slots = self.allocator.alloc_extend(len(old), length, last, room)
        if need > NUM_PAGES - len(held):
            assert slots is None
            assert self.allocator.available_size() == available
            return
        assert slots is not None
        fresh = slots[-len(old) % self.page_size :]
        assert held.isdisjoint((fresh // self.page_size).tolist())
        following = last // self.page_size + 1
        if need and following <= NUM_PAGES and following not in held:
            assert fresh[0] // self.page_size == following
        self.requests[name] = self.checked(np.concatenate([old, slots]), length)

    def checked(self, slots: np.ndarray, length: int) -> np.ndarray:
        """A request's slots have the asked-for length, a slot each, and lie in pages at the right offset."""
        assert slots.dtype == np.int64
        assert len(slots) == length == len(set(slots.tolist()))
        assert ((slots - np.arange(length)) % self.page_size == 0).all()
        assert slots.min() >= self.page_size
        assert slots.max() < self.page_size * (NUM_PAGES + 1)
        assert len(np.unique(slots // self.page_size)) == self.pages(length)
        return slots

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), tokens=st.integers(0, 40))
    def truncate(self, data, tokens):
        name = data.draw(st.sampled_from(sorted(self.requests)))
        old = self.requests[name]
        length = max(1, len(old) - tokens)
        self.allocator.truncate(length, old[length:])
        self.requests[name] = self.checked(old[:length], length)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), shuffled=st.booleans())
    def end(self, data, shuffled):
        name = data.draw(st.sampled_from(sorted(self.requests)))
        slots = self.requests.pop(name)
        self.allocator.free(slots[::-1] if shuffled else slots)
        with pytest.raises(EngineError):
            self.allocator.free(slots[:1])

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def release_room(self, data):
        name = data.draw(st.sampled_from(sorted(self.requests)))
        self.allocator.release_room(int(self.requests[name][-1]))

    @rule()
    def take_all(self):
        """No page is lost: all that is available can be had, and nothing more."""
        available = self.allocator.available_size()
        if available:
            slots = self.allocator.alloc_extend(0, available, -1)
            assert self.held.isdisjoint((slots // self.page_size).tolist())
            assert len(set(slots.tolist())) == available
            assert self.allocator.alloc_extend(0, 1, -1) is None
            self.allocator.free(slots)

    @invariant()
    def conserves(self):
        assert self.allocator.available_size() == (NUM_PAGES - len(self.held)) * self.page_size

    def teardown(self):
        for slots in self.requests.values():
            self.allocator.free(slots)
        assert num_runs(self.allocator.alloc_extend(0, self.allocator.size, -1)) == 1


class AllocatorMachine16(AllocatorMachine):
    page_size = 16


SETTINGS = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True, database=None)
TestAllocator1 = AllocatorMachine.TestCase
TestAllocator16 = AllocatorMachine16.TestCase
for case in (TestAllocator1, TestAllocator16):
    case.settings = SETTINGS
del case


def decode(allocator: TokenToKVPoolAllocator, requests: list[np.ndarray], steps: int) -> list[np.ndarray]:
    """All requests grow by a token in every step, with room for what is left."""
    for step in range(steps):
        for i, slots in enumerate(requests):
            grown = allocator.alloc_extend(len(slots), len(slots) + 1, int(slots[-1]), room=steps - step - 1)
            assert grown is not None
            requests[i] = np.concatenate([slots, grown])
    return requests


@pytest.mark.parametrize("page_size", [1, 16])
def test_chunks_of_a_prompt_and_its_answer_keep_one_run(page_size):
    allocator = TokenToKVPoolAllocator(16 * 512, page_size)
    lengths = [300 + i for i in range(16)]
    requests = [np.empty(0, dtype=np.int64)] * 16
    for start in range(0, 320, 64):
        for i, slots in enumerate(requests):
            last, end = int(slots[-1]) if len(slots) else -1, min(start + 64, lengths[i])
            grown = allocator.alloc_extend(start, end, last, room=lengths[i] - end + 128)
            requests[i] = np.concatenate([slots, grown])
    requests = decode(allocator, requests, 128)
    assert [num_runs(slots) for slots in requests] == [1] * 16
    for slots in requests:
        allocator.free(slots)
    assert allocator.available_size() == allocator.size


def test_rooms_are_halved_when_open_space_is_short():
    allocator = TokenToKVPoolAllocator(64, 1)
    first = allocator.alloc_extend(0, 4, -1, room=60)
    second = allocator.alloc_extend(0, 4, -1, room=60)
    third = allocator.alloc_extend(0, 4, -1, room=60)
    # 60 pages of room: 30 to the second (4 + 26), 15 of the first's 30 to the third (4 + 11)
    assert (first[0], second[0], third[0]) == (1, 35, 20)
    requests = decode(allocator, [first, second, third], 11)
    assert [num_runs(slots) for slots in requests] == [1, 1, 1]


def test_the_shortest_gap_that_holds_a_request_and_its_room_is_taken():
    allocator = TokenToKVPoolAllocator(100, 1)
    slots = allocator.alloc_extend(0, 100, -1)
    allocator.free(slots[10:20])
    allocator.free(slots[30:36])
    allocator.free(slots[50:90])
    assert allocator.alloc_extend(0, 3, -1, room=3)[0] == 31
    assert allocator.alloc_extend(0, 3, -1, room=5)[0] == 11
    assert allocator.alloc_extend(0, 3, -1, room=90)[0] == 51


def test_a_room_ends_with_its_request():
    for freed in (False, True):
        allocator = TokenToKVPoolAllocator(32, 1)
        slots = allocator.alloc_extend(0, 4, -1, room=8)  # 5..12
        assert allocator.alloc_extend(0, 4, -1).tolist() == [13, 14, 15, 16]
        if freed:
            allocator.free(slots[3:])
        else:
            allocator.release_room(-1)
            allocator.release_room(int(slots[-1]))
        # open: 5..12 (or 4..12) and 17..32; the shorter one fits, so it is taken
        assert allocator.alloc_extend(0, 8, -1)[0] == (4 if freed else 5)


@pytest.mark.parametrize("page_size", [1, 4])
def test_drafts_taken_back_cost_no_run(page_size):
    """Requests that grow by drafts and take most of them back, side by side, stay in one run each."""
    allocator = TokenToKVPoolAllocator(1024, page_size)
    requests = [allocator.alloc_extend(0, 10, -1, room=60) for _ in range(8)]
    for step in range(20):
        for i, slots in enumerate(requests):
            drafts = allocator.alloc_extend(len(slots), len(slots) + 8, int(slots[-1]), room=60)
            requests[i] = np.concatenate([slots, drafts])
        for i, slots in enumerate(requests):
            length = len(slots) - 8 + 1 + (step + i) % 3
            allocator.truncate(length, slots[length:])
            requests[i] = slots[:length]
    assert [num_runs(slots) for slots in requests] == [1] * 8
    pages = sum(allocator.pages_needed(0, len(slots)) for slots in requests)
    assert allocator.available_size() == 1024 - pages * page_size


def test_what_cannot_be_freed_changes_nothing():
    allocator = TokenToKVPoolAllocator(32, 4)
    slots = allocator.alloc_extend(0, 8, -1)
    for bad, complaint in (
        ([4, 12], "page 3, which nobody holds"),
        ([0, 4], r"slot 0: outside of 4\.\.35"),
        ([4, 36], "slot 36: outside"),
        ([-1, 4], "slot -4: outside"),
    ):
        with pytest.raises(EngineError, match=complaint):
            allocator.free(np.array(bad))
        assert allocator.available_size() == 24
    allocator.free(np.empty(0, dtype=np.int64))
    allocator.free(slots[:1])  # whole pages
    assert allocator.available_size() == 28


def test_device_table():
    pool = ReqToTokenPool(2, 6, "cpu")
    assert (pool.size, pool.max_context_len) == (2, 6)
    pool.write(1, 2, torch.tensor([30, 31, 32]))
    pool.write(1, 5, np.array([33]))
    assert pool.req_to_token.dtype == torch.int32
    assert pool.req_to_token.tolist() == [[0] * 6, [0, 0, 30, 31, 32, 33], [0] * 6]
    for req_pool_idx, start in ((2, 0), (-1, 0), (0, 6), (0, -1)):
        with pytest.raises(EngineError):
            pool.write(req_pool_idx, start, torch.tensor([1]))
