"""States of recurrent layers against a naive model: where a prefix can be resumed, and who has which state."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vlmserve.memory.recurrent_cache import GuessCache, RecurrentCache, StateShape
from vlmserve.memory.recurrent_states import BLANK, RecurrentStates

PAGE = 4
PAGES = 10
STATES = 4
NUM_SLOTS = PAGE * (PAGES + 1)
SETTINGS = settings(max_examples=40, stateful_step_count=40, deadline=None, derandomize=True, database=None)


class StatesMachine(RuleBasedStateMachine):
    """The model: what every state holds (the name of a prefix), and the order in which snapshots were last used."""

    def __init__(self):
        super().__init__()
        self.states = RecurrentStates(STATES, num_slots=NUM_SLOTS, page_size=PAGE)
        self.content = {BLANK: "blank"}
        self.requests: dict[int, str] = {}  # state -> content
        self.snapshots: dict[int, str] = {}  # slot -> content, the least recently used first
        self.names = itertools.count()

    def copy(self, job) -> None:
        assert job.target != BLANK
        self.content[job.target] = self.content[job.source]

    def touch(self, slot: int) -> None:
        self.snapshots[slot] = self.snapshots.pop(slot)

    def evicts(self) -> bool:
        """Make room for a state, as the pool should; False if there is none."""
        if len(self.requests) + len(self.snapshots) < STATES:
            return True
        if self.snapshots:
            del self.snapshots[next(iter(self.snapshots))]
            return True
        return False

    @precondition(lambda self: len(self.requests) < STATES - 1)
    @rule(data=st.data(), begins=st.booleans())
    def fork(self, data, begins):
        slot = None if begins or not self.snapshots else data.draw(st.sampled_from(sorted(self.snapshots)))
        if slot is not None:
            self.touch(slot)
        assert self.evicts()
        job = self.states.fork(slot)
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
        if known:
            self.touch(slot)
        if job is not None:
            self.copy(job)
            self.snapshots[slot] = self.requests[state]

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def end(self, data):
        state = data.draw(st.sampled_from(sorted(self.requests)))
        del self.requests[state]
        self.states.free_state(state)

    @rule(pages=st.sets(st.integers(1, PAGES), max_size=3))
    def free_pages(self, pages):
        slots = [page * PAGE + PAGE - 1 for page in pages]
        self.states.free_pages(np.array(sorted(pages), dtype=np.int64))
        for slot in slots:
            self.snapshots.pop(slot, None)

    @rule(old=st.integers(1, PAGES), new=st.integers(1, PAGES))
    def replace_page(self, old, new):
        if old == new:
            return
        self.states.replace_pages(np.array([old]), np.array([new]))
        slot, other = old * PAGE + PAGE - 1, new * PAGE + PAGE - 1
        if slot in self.snapshots and other not in self.snapshots:
            self.snapshots[other] = self.snapshots.pop(slot)

    @rule(pages=st.permutations(range(1, PAGES + 1)), length=st.integers(0, PAGE * PAGES))
    def match(self, pages, length):
        slots = np.concatenate([np.arange(page * PAGE, page * PAGE + PAGE) for page in pages])
        ends = [end for end in range(1, length + 1) if int(slots[end - 1]) in self.snapshots]
        assert self.states.resumable(slots[:length]) == max(ends, default=0)

    @invariant()
    def equals_the_model(self):
        assert self.states.available_size() == STATES - len(self.requests)
        for state, content in self.requests.items():
            assert self.content[state] == content
        for slot, content in self.snapshots.items():
            assert self.content[int(self.states._state_at[slot])] == content


TestStates = StatesMachine.TestCase
TestStates.settings = SETTINGS


@pytest.mark.parametrize("more", [{}, {"hidden": 7}, {"ngram_conv": (1, 9, 12), "ngram_ids": 2}])
def test_memory_is_counted_as_it_is_taken(more):
    shape = StateShape(conv=(2, 3, 8), recurrent=(2, 4, 6, 5), conv_dtype=torch.bfloat16, **more)
    cache, guesses = RecurrentCache(3, shape, torch.device("cpu")), GuessCache(2, 5, shape, torch.device("cpu"))
    taken = [
        sum(part.nbytes for part in vars(one).values() if isinstance(part, torch.Tensor)) for one in (cache, guesses)
    ]
    assert taken == [4 * shape.nbytes, 2 * shape.guess_bytes(5)]
