"""Cache groups against naive models: where a prefix can be resumed, and who has which state."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vlmserve.memory.cache_groups import CacheGroups
from vlmserve.memory.recurrent_states import BLANK, RecurrentStates
from vlmserve_common.errors import EngineError

PAGE = 4
PAGES = 10
NUM_SLOTS = PAGE * (PAGES + 1)
SETTINGS = settings(max_examples=40, stateful_step_count=40, deadline=None, derandomize=True, database=None)


class StatesMachine(RuleBasedStateMachine):
    """The model: what every state holds (the name of a prefix), and the order in which snapshots were last used."""

    def __init__(self):
        super().__init__()
        self.states = RecurrentStates(4, num_slots=NUM_SLOTS, page_size=PAGE)
        self.content = {BLANK: "blank"}
        self.requests: dict[int, str] = {}  # state -> content
        self.snapshots: dict[int, str] = {}  # slot -> content, the least recently used first
        self.locks: dict[int, int] = {}
        self.names = itertools.count()

    def copy(self, job) -> None:
        assert job.target != BLANK
        self.content[job.target] = self.content[job.source]

    def touch(self, slot: int) -> None:
        self.snapshots[slot] = self.snapshots.pop(slot)

    def evicts(self, keep: int | None = None) -> bool:
        """Make room for a state, as the pool should; False if there is none."""
        if len(self.requests) + len(self.snapshots) < 4:
            return True
        loose = [slot for slot in self.snapshots if slot not in self.locks and slot != keep]
        if loose:
            del self.snapshots[loose[0]]
        return bool(loose)

    @rule(data=st.data(), begins=st.booleans())
    def fork(self, data, begins):
        slot = None if begins or not self.snapshots else data.draw(st.sampled_from(sorted(self.snapshots)))
        fits = self.evicts(keep=slot)
        job = self.states.fork(slot)
        if slot is not None and slot not in self.locks:
            self.touch(slot)
        assert (job is not None) == fits
        if job is not None:
            self.copy(job)
            assert job.target not in self.requests
            self.requests[job.target] = "blank" if slot is None else self.snapshots[slot]

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def compute(self, data):
        state = data.draw(st.sampled_from(sorted(self.requests)))
        self.requests[state] = self.content[state] = f"prefix {next(self.names)}"

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), page=st.integers(1, PAGES))
    def snapshot(self, data, page):
        state, slot = data.draw(st.sampled_from(sorted(self.requests))), page * PAGE + PAGE - 1
        known = slot in self.snapshots
        fits = not known and self.evicts()
        job = self.states.snapshot(slot, state)
        assert (job is not None) == fits
        if known and slot not in self.locks:
            self.touch(slot)
        if job is not None:
            self.copy(job)
            self.snapshots[slot] = self.requests[state]

    @precondition(lambda self: self.snapshots)
    @rule(data=st.data())
    def lock(self, data):
        slot = data.draw(st.sampled_from(sorted(self.snapshots)))
        self.states.lock(slot)
        self.locks[slot] = self.locks.get(slot, 0) + 1

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def unlock(self, data):
        slot = data.draw(st.sampled_from(sorted(self.locks)))
        self.states.unlock(slot)
        self.locks[slot] -= 1
        if not self.locks[slot]:
            del self.locks[slot]
            self.touch(slot)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data):
        state = data.draw(st.sampled_from(sorted(self.requests)))
        del self.requests[state]
        self.states.free_state(state)
        with pytest.raises(EngineError, match="not a request's"):
            self.states.free_state(state)

    @rule(pages=st.sets(st.integers(1, PAGES), max_size=3))
    def free_pages(self, pages):
        slots = [page * PAGE + PAGE - 1 for page in pages]
        if any(slot in self.locks for slot in slots):
            with pytest.raises(EngineError, match="locked"):
                self.states.free_pages(np.array(sorted(pages)))
            return
        self.states.free_pages(np.array(sorted(pages), dtype=np.int64))
        for slot in slots:
            self.snapshots.pop(slot, None)

    @rule(old=st.integers(1, PAGES), new=st.integers(1, PAGES))
    def replace_page(self, old, new):
        if old == new:
            return
        self.states.replace_pages(np.array([old]), np.array([new]))
        slot, other = old * PAGE + PAGE - 1, new * PAGE + PAGE - 1
        if slot in self.snapshots and slot not in self.locks and other not in self.snapshots:
            self.snapshots[other] = self.snapshots.pop(slot)

    @rule(pages=st.permutations(range(1, PAGES + 1)), length=st.integers(0, PAGE * PAGES))
    def match(self, pages, length):
        slots = np.concatenate([np.arange(page * PAGE, page * PAGE + PAGE) for page in pages])
        ends = [end for end in range(1, length + 1) if int(slots[end - 1]) in self.snapshots]
        assert self.states.resumable(slots, length) == max(ends, default=0)

    @invariant()
    def equals_the_model(self):
        assert self.states.evictable_size() == len(self.snapshots) - len(self.locks)
        assert self.states.available_size() == 4 - len(self.requests) - len(self.locks)
        for state, content in self.requests.items():
            assert self.content[state] == content
        for slot, content in self.snapshots.items():
            assert self.content[int(self.states._state_at[slot])] == content


TestStates = StatesMachine.TestCase
TestStates.settings = SETTINGS


def test_states_that_are_misused():
    states = RecurrentStates(2, num_slots=NUM_SLOTS, page_size=PAGE)
    state = states.fork(None).target
    with pytest.raises(EngineError, match="slot 5, which does not end a page of 4"):
        states.snapshot(5, state)
    for misuse in (states.lock, states.fork):
        with pytest.raises(EngineError, match="no snapshot behind slot 7"):
            misuse(7)
    states.snapshot(7, state)
    with pytest.raises(EngineError, match="unlocked more often"):
        states.unlock(7)


class Positions:
    """A group that can go on from these positions."""

    def __init__(self, positions: set[int]) -> None:
        self.positions = positions | {0}

    def resumable(self, slots: np.ndarray, length: int) -> int:
        return max(position for position in self.positions if position <= length)

    def free_pages(self, pages: np.ndarray) -> None:
        raise NotImplementedError

    def replace_pages(self, old: np.ndarray, new: np.ndarray) -> None:
        raise NotImplementedError


@given(st.lists(st.sets(st.integers(0, 20)), max_size=3), st.integers(0, 20))
@settings(derandomize=True, database=None)
def test_a_match_is_what_all_can_resume(groups, length):
    expected = max(set(range(length + 1)).intersection(*({0, *positions} for positions in groups)))
    slots = np.arange(length)
    assert CacheGroups(list(map(Positions, groups))).common_prefix(slots) == expected
