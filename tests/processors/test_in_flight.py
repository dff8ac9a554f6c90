"""Work that several ask for at the same time: one leads, and nobody is lost."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from processors.pool.in_flight import InFlight

KEYS = st.sampled_from("ab")


class Model(RuleBasedStateMachine):
    """Against lists of who leads and who follows, in order."""

    def __init__(self):
        super().__init__()
        self.in_flight = InFlight()
        self.under_way = {}  # key: [leader, follower, ...]
        self.comers = iter(range(10**6))

    @rule(key=KEYS)
    def come(self, key):
        who = next(self.comers)
        assert self.in_flight.leads(key, who) == (key not in self.under_way)
        self.under_way.setdefault(key, []).append(who)

    @precondition(lambda self: self.under_way)
    @rule(key=KEYS, place=st.integers(0, 9))
    def leave(self, key, place):
        those = self.under_way.get(key, [])
        who = those[place] if place < len(those) else -1
        follows = who in those[1:]
        assert self.in_flight.leave(key, who) == follows
        if follows:
            those.remove(who)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def done(self, data):
        key = data.draw(st.sampled_from(sorted(self.under_way)))
        assert self.in_flight.done(key) == self.under_way.pop(key)[1:]

    @precondition(lambda self: self.under_way)
    @rule(data=st.data())
    def hand_over(self, data):
        key = data.draw(st.sampled_from(sorted(self.under_way)))
        del self.under_way[key][0]
        assert self.in_flight.hand_over(key) == next(iter(self.under_way[key]), None)
        if not self.under_way[key]:
            del self.under_way[key]

    @invariant()
    def nothing_else_is_kept(self):
        assert len(self.in_flight) == len(self.under_way)


TestModel = Model.TestCase
TestModel.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_one_leads_however_many_come_at_once():
    in_flight, barrier = InFlight(), threading.Barrier(8)

    def come(who):
        barrier.wait(20)
        return in_flight.leads("key", who)

    with ThreadPoolExecutor(8) as threads:
        led = list(threads.map(come, range(8)))
    assert led.count(True) == 1
    assert sorted([*in_flight.done("key"), led.index(True)]) == list(range(8))
