"""A hybrid model's memory as a whole: what the prefix cache gives to a request is there in every group of its cache.

The model of each kind of memory is what was written where: the prefix whose last token a slot or a state is of.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.vlmserve.scheduler.reqs import make_req
from vlmserve.memory.allocator import TokenToKVPoolAllocator
from vlmserve.memory.radix_cache import RadixCache
from vlmserve.memory.recurrent_states import BLANK, RecurrentStates
from vlmserve.memory.req_to_token import ReqPoolAllocator
from vlmserve.scheduler.kv_cache_manager import KVCacheManager
from vlmserve.scheduler.req import Req

PAGE, TOKENS, LONGEST, REQS, STATES = 2, 32, 14, 3, 64
Prefix: TypeAlias = tuple[int, ...]


@dataclass(eq=False)
class Running:
    """state: its recurrent state."""

    req: Req
    state: int

    @property
    def so_far(self) -> Prefix:
        return tuple(self.req.origin_input_ids[: self.req.kv_len].tolist())


class GroupsMachine(RuleBasedStateMachine):
    """Does for each request what the steps of a model with such groups would do."""

    def __init__(self):
        super().__init__()
        self.allocator = TokenToKVPoolAllocator(TOKENS, PAGE)
        self.cache = RadixCache(self.allocator)
        self.states = RecurrentStates(STATES, num_slots=TOKENS + PAGE, page_size=PAGE)
        self.kv = KVCacheManager(
            self.allocator,
            self.cache,
            ReqPoolAllocator(REQS, LONGEST + PAGE),
            groups=(self.states,),
        )
        self.running: list[Running] = []
        self.count = 0
        self.in_slot: dict[int, Prefix] = {}
        self.in_state: dict[int, Prefix] = {BLANK: ()}
        self.resumed = self.cut = 0

    def prefixes(self, of: Running, start: int) -> list[Prefix]:
        return [of.so_far[:end] for end in range(start + 1, of.req.kv_len + 1)]

    def resumable(self, key: Prefix) -> int:
        """Where a prompt can go on from, by what was written where."""
        slots = self.cache.match_slots(np.array(key, dtype=np.int64)).tolist()
        for end in range(len(slots), 0, -PAGE):
            state = int(self.states._state_at[slots[end - 1]])
            if self.in_state.get(state) == key[:end]:
                return end
        return 0

    @precondition(lambda self: len(self.running) < REQS)
    @rule(common=st.integers(1, LONGEST - 2), tail=st.lists(st.integers(1, 2), max_size=2))
    def start(self, common, tail):
        prompt = [1 + place % 3 for place in range(common)] + tail
        self.count += 1
        req = make_req(self.count, prompt=prompt, new=1)
        expected = self.resumable(tuple(prompt[:-1]))
        cached = self.cache.match_len(np.array(prompt[:-1], dtype=np.int64))
        assert self.kv.matched_len(req) == expected
        assert self.kv.start(req) is not None
        assert req.kv_len == expected
        self.resumed += expected > 0
        self.cut += expected < cached
        slots = self.kv.slots(req, 0, req.kv_len)
        job = self.states.fork(int(slots[-1]) if len(slots) else None)
        assert job is not None
        self.in_state[job.target] = self.in_state[job.source]
        one = Running(req, job.target)
        self.running.append(one)
        for end in range(1, req.kv_len + 1):
            assert self.in_slot[int(slots[end - 1])] == one.so_far[:end]
        assert self.in_state[one.state] == one.so_far

    @precondition(lambda self: self.running)
    @rule(data=st.data(), length=st.integers(1, 6), share=st.booleans(), snapshot=st.booleans())
    def compute(self, data, length, share, snapshot):
        one = data.draw(st.sampled_from(self.running))
        req, start = one.req, one.req.kv_len
        length = min(length, req.prompt_len - start)
        if not length or not self.kv.extend(req, length):
            return
        req.kv_len += length
        slots = self.kv.slots(req, 0, req.kv_len)
        for end in range(start + 1, req.kv_len + 1):
            self.in_slot[int(slots[end - 1])] = one.so_far[:end]
        self.in_state[one.state] = one.so_far
        if snapshot and req.kv_len % PAGE == 0:  # on a slot that may be the request's own
            job = self.states.snapshot(int(slots[-1]), one.state)
            if job is not None:
                self.in_state[job.target] = self.in_state[job.source]
        self.kv.commit(req, req.kv_len)
        if share:
            self.kv.share(req)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data):
        one = data.draw(st.sampled_from(self.running))
        self.running.remove(one)
        self.states.free_state(one.state)
        self.kv.release(one.req)

    @rule(tokens=st.integers(1, TOKENS))
    def evict(self, tokens):
        self.cache.evict(tokens)

    @invariant()
    def nothing_hangs_on_pages_that_nobody_holds(self):
        held = np.flatnonzero(self.allocator._held)
        assert set(np.flatnonzero(self.states._state_at) // PAGE) <= set(held.tolist())
        for one in self.running:
            assert self.in_state[one.state] == one.so_far
            slots = self.kv.slots(one.req, 0, one.req.kv_len)
            for place in range(one.req.kv_len):
                assert self.in_slot[int(slots[place])] == one.so_far[: place + 1]

    def teardown(self):
        for one in list(self.running):
            self.states.free_state(one.state)
            self.kv.release(one.req)
        self.cache.reset()
        assert self.allocator.available_size() == TOKENS
        assert self.states.available_size() == STATES
        assert self.states.evictable_size() == 0


TestGroups = GroupsMachine.TestCase
TestGroups.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True, database=None)
