"""A hybrid model's memory as a whole: what the prefix cache gives to a request is there in every group of its cache.

The model of each kind of memory is what was written where: the prefix whose last token a slot or a state is of.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from vlmserve.memory.groups.sliding_window import SlidingWindow

from tests.vlmserve.scheduler.reqs import make_req
from vlmserve.memory.allocator import TokenToKVPoolAllocator
from vlmserve.memory.radix_cache import RadixCache
from vlmserve.memory.recurrent_states import BLANK, RecurrentStates
from vlmserve.memory.req_to_token import ReqPoolAllocator
from vlmserve.scheduler.kv_cache_manager import KVCacheManager
from vlmserve.scheduler.req import Req

PAGE, TOKENS, LONGEST, REQS, WINDOW, STATES = 2, 32, 14, 3, 3, 64
Prefix: TypeAlias = tuple[int, ...]


@dataclass(eq=False)
class Running:
    """state: its recurrent state. pinned: the pages of its window, counted from its beginning."""

    req: Req
    state: int
    pinned: set[int] = field(default_factory=set)

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
        self.window_slots = TokenToKVPoolAllocator(TOKENS, PAGE)
        self.window = SlidingWindow(self.window_slots, num_slots=TOKENS + PAGE, window=WINDOW)
        self.kv = KVCacheManager(
            self.allocator,
            self.cache,
            ReqPoolAllocator(REQS, LONGEST + PAGE),
            groups=(self.states, self.window),
        )
        self.running: list[Running] = []
        self.count = 0
        self.in_slot: dict[int, Prefix] = {}
        self.in_window: dict[int, Prefix] = {}
        self.in_state: dict[int, Prefix] = {BLANK: ()}
        self.resumed = self.cut = 0

    def prefixes(self, of: Running, start: int) -> list[Prefix]:
        return [of.so_far[:end] for end in range(start + 1, of.req.kv_len + 1)]

    def resumable(self, key: Prefix) -> int:
        """Where a prompt can go on from, by what was written where."""
        slots = self.cache.match_slots(np.array(key, dtype=np.int64)).tolist()
        for end in range(len(slots), 0, -PAGE):
            state = int(self.states._state_at[slots[end - 1]])
            tail = self.window.locate(np.array(slots[max(0, end - WINDOW) : end])).tolist()
            if self.in_state.get(state) == key[:end] and all(slot >= PAGE for slot in tail):
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
        tail = range(max(0, req.kv_len - WINDOW), req.kv_len)
        for place in tail:
            assert self.in_window[int(self.window.locate(slots)[place])] == one.so_far[: place + 1]
        assert self.in_state[one.state] == one.so_far
        one.pinned = {place // PAGE for place in tail}
        self.window.pin(self.pages(one, one.pinned))

    def pages(self, one: Running, pages) -> np.ndarray:
        slots = self.kv.slots(one.req, 0, one.req.kv_allocated_len)
        return slots[[page * PAGE for page in sorted(pages)]]

    @precondition(lambda self: self.running)
    @rule(data=st.data(), length=st.integers(1, 6), share=st.booleans(), snapshot=st.booleans())
    def compute(self, data, length, share, snapshot):
        one = data.draw(st.sampled_from(self.running))
        req, start = one.req, one.req.kv_len
        length = min(length, req.prompt_len - start)
        if not length or not self.kv.extend(req, length):
            return
        new = self.kv.slots(req, start, start + length)
        assert self.window.alloc(new)
        req.kv_len += length
        one.pinned |= {place // PAGE for place in range(start, req.kv_len)}
        slots = self.kv.slots(req, 0, req.kv_len)
        for end in range(start + 1, req.kv_len + 1):
            self.in_slot[int(slots[end - 1])] = one.so_far[:end]
            self.in_window[int(self.window.locate(slots)[end - 1])] = one.so_far[:end]
        self.in_state[one.state] = one.so_far
        if snapshot and req.kv_len % PAGE == 0:  # on a slot that may be the request's own
            job = self.states.snapshot(int(slots[-1]), one.state)
            if job is not None:
                self.in_state[job.target] = self.in_state[job.source]
        self.kv.commit(req, req.kv_len)
        if share:
            self.kv.share(req)
        behind = {page for page in one.pinned if (page + 1) * PAGE <= req.kv_len - WINDOW}
        self.window.unpin(self.pages(one, behind))
        one.pinned -= behind

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data):
        one = data.draw(st.sampled_from(self.running))
        self.running.remove(one)
        self.states.free_state(one.state)
        self.window.unpin(self.pages(one, one.pinned))
        self.kv.release(one.req)

    @rule(tokens=st.integers(1, TOKENS))
    def evict(self, tokens):
        self.cache.evict(tokens)

    @rule()
    def crowd_windows_out(self):
        """As a burst of others would."""
        if self.window._loose:
            self.window._drop(next(iter(self.window._loose)))

    @invariant()
    def nothing_hangs_on_pages_that_nobody_holds(self):
        held = np.flatnonzero(self.allocator._held)
        assert set(np.flatnonzero(self.states._state_at) // PAGE) <= set(held.tolist())
        assert set(np.flatnonzero(self.window._page_of).tolist()) <= set(held.tolist())
        for one in self.running:
            assert self.in_state[one.state] == one.so_far
            slots = self.kv.slots(one.req, 0, one.req.kv_len)
            for place in range(max(0, one.req.kv_len - WINDOW), one.req.kv_len):
                assert self.in_slot[int(slots[place])] == one.so_far[: place + 1]
                assert self.in_window[int(self.window.locate(slots)[place])] == one.so_far[: place + 1]

    def teardown(self):
        for one in list(self.running):
            self.states.free_state(one.state)
            self.window.unpin(self.pages(one, one.pinned))
            self.kv.release(one.req)
        self.cache.reset()
        assert self.allocator.available_size() == TOKENS
        assert self.window_slots.available_size() == TOKENS
        assert self.states.available_size() == STATES
        assert self.states.evictable_size() == 0


TestGroups = GroupsMachine.TestCase
TestGroups.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, derandomize=True, database=None)
