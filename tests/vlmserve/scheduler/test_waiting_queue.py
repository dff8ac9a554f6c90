"""The waiting queue beside a naive model of it, and what it promises: turns, and tries that cost the same however many
wait."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.vlmserve.scheduler.reqs import make_req
from vlmserve.ipc.messages import FinishReason
from vlmserve.scheduler.policy import HEAD, make_policy
from vlmserve.scheduler.req import Req
from vlmserve.scheduler.req_life import ReqStatus
from vlmserve.scheduler.waiting_queue import LOOKAHEAD, MISSES, WaitingQueue

DONE = FinishReason(type="length")


def make_queue(name: str = "fcfs", match=lambda req: 0) -> WaitingQueue:
    return WaitingQueue(make_policy(name, match=match, path=lambda req: ()))


class AgainstModel(RuleBasedStateMachine):
    """The model: lists, and a counter for each flow. It says of each try whether it may be the next."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = make_queue("srtf")
        self.policy = make_policy("srtf", match=None, path=None)
        self.counters: dict[str, float] = {}
        self.least = 0.0
        self.reqs: list[Req] = []

    def of_flow(self, flow: str, *statuses: ReqStatus) -> list[Req]:
        return [req for req in self.reqs if req.flow == flow and req.status in statuses]

    def candidates(self, flow: str) -> list[Req]:
        waiting = self.of_flow(flow, ReqStatus.WAITING, ReqStatus.RETRACTED)
        waiting.sort(key=lambda req: (self.policy.keys([req]), req.arrival))
        return [*self.of_flow(flow, ReqStatus.PREFILLING), *waiting]

    @rule(client=st.sampled_from("abcd"), new=st.integers(1, 50), choice=st.integers(0, 2))
    def arrive(self, client, new, choice):
        req = make_req(len(self.reqs), client=client, new=new, choice=choice)
        self.counters.setdefault(req.flow, 0.0)
        self.lift(req)
        self.reqs.append(req)
        self.queue.arrive(req)

    def lift(self, req: Req) -> None:
        """A flow that had nothing to be tried begins where the least served one is."""
        if not self.candidates(req.flow):
            self.counters[req.flow] = max(self.counters[req.flow], self.least)

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def end(self, data):
        req = data.draw(st.sampled_from(self.alive()))
        self.queue.leave(req)
        req.finish(DONE)

    @rule(client=st.sampled_from("abcd"))
    def go(self, client):
        """A client that comes again has been given what it was given."""
        for req in self.alive():
            if req.client == client:
                self.queue.leave(req)
                req.finish(DONE)

    @precondition(lambda self: self.alive(ReqStatus.DECODING))
    @rule(data=st.data(), cost=st.integers(1, 20))
    def decode(self, data, cost):
        self.charge(data.draw(st.sampled_from(self.alive(ReqStatus.DECODING))), cost)

    @precondition(lambda self: self.alive(ReqStatus.DECODING))
    @rule(data=st.data())
    def retract(self, data):
        req = data.draw(st.sampled_from(self.alive(ReqStatus.DECODING)))
        self.lift(req)
        req.move_to(ReqStatus.RETRACTED)
        self.queue.add(req)

    @rule(ready=st.sampled_from(["abcd", "a", "bc"]))
    def unblock(self, ready):
        for req in self.alive(ReqStatus.WAITING_FOR_ENCODER):
            if req.client in ready:
                self.lift(req)
        self.queue.unblock(lambda req: req.client in ready)
        assert not [req for req in self.alive(ReqStatus.WAITING_FOR_ENCODER) if req.client in ready]

    @rule(
        outcomes=st.lists(
            st.sampled_from(["stop", "miss", "miss", "block", "chunk", "chunk", "whole"]), min_size=1, max_size=12
        ),
        cost=st.integers(1, 20),
    )
    def visit(self, outcomes, cost):
        todo = iter([*outcomes, "stop"])
        flows = {req.flow for req in self.reqs}
        left = {flow: self.candidates(flow) for flow in flows}
        last = ""

        def attempt(req: Req) -> bool:
            nonlocal last
            counters = {flow: self.counters[flow] for flow, candidates in left.items() if candidates}
            assert self.counters[req.flow] == min(counters.values()), "the least served flow goes first"
            assert left[req.flow].pop(0) is req, "in the policy's order, those in progress first"
            self.least = max(self.least, self.counters[req.flow])
            last = next(todo)
            if last == "block" and req.status.is_queued:
                self.queue.block(req, ReqStatus.WAITING_FOR_ENCODER)
            if last in ("chunk", "whole"):
                self.compute(req, cost, last == "whole")
            return last != "stop"

        self.queue.visit(attempt)
        assert last == "stop" or not any(left.values()), "nobody is left out"

    def compute(self, req: Req, cost: int, whole: bool) -> None:
        if req.status.is_queued:
            self.queue.remove(req)
            req.move_to(ReqStatus.PREFILLING)
            self.queue.set_in_progress(req, True)
        if whole:
            self.queue.set_in_progress(req, False)
            req.move_to(ReqStatus.DECODING)
        self.charge(req, cost)

    def charge(self, req: Req, cost: int) -> None:
        self.queue.charge(req, cost)
        self.counters[req.flow] += cost

    def alive(self, *statuses: ReqStatus) -> list[Req]:
        return [req for req in self.reqs if not req.is_finished and (not statuses or req.status in statuses)]

    @invariant()
    def counts(self):
        self.queue.check()
        queued = [req for req in self.reqs if req.status.is_queued]
        assert len(self.queue) == len(queued)
        assert sorted(req.arrival for req in self.queue) == [req.arrival for req in queued]
        assert self.queue.in_progress == self.alive(ReqStatus.PREFILLING)
        if queued:
            heads = [
                next((req for req in self.candidates(flow) if req.status.is_queued), None) for flow in self.counters
            ]
            blocked = self.alive(ReqStatus.WAITING_FOR_ENCODER)
            fronts = [req.arrival for req in (*heads, *blocked) if req is not None]
            assert self.queue.first().arrival == min(fronts)


TestAgainstModel = AgainstModel.TestCase
TestAgainstModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_client_does_not_get_rid_of_what_it_was_given_by_coming_anew():
    machine = AgainstModel()
    for client in "ab":
        machine.arrive(client=client, new=8, choice=0)
    for cost in (20, 1):  # of a, then of b
        machine.visit(outcomes=["whole"], cost=cost)
    machine.arrive(client="b", new=8, choice=0)
    machine.go(client="a")
    machine.arrive(client="a", new=8, choice=0)
    machine.visit(outcomes=["stop"], cost=1)


def tries(queue: WaitingQueue) -> list[Req]:
    found: list[Req] = []

    def attempt(req: Req) -> bool:
        found.append(req)
        return True

    queue.visit(attempt)
    return found


def test_a_flow_that_cannot_go_on_does_not_use_up_the_tries_of_others():
    queue = make_queue()
    for i in range(1000):
        queue.arrive(make_req(i, client="stuck"))
    queue.arrive(make_req(1000, client="other"))
    queue.charge(next(req for req in queue if req.client == "other"), 1e6)
    found = Counter(req.client for req in tries(queue))
    assert found == {"stuck": MISSES, "other": 1}


@pytest.mark.parametrize(("name", "clients"), [("fcfs", 1000), ("lpm", 1), ("lpm", 50)])
def test_tries_are_bounded_however_many_wait(name, clients):
    asked = []
    queue = make_queue(name, match=lambda req: asked.append(req) or 0)
    for i in range(5000):
        queue.arrive(make_req(i, client=str(i % clients)))
    found = tries(queue)
    assert min(clients * MISSES, LOOKAHEAD // 2) <= len(found) <= LOOKAHEAD
    assert len(set(found)) == len(found)
    assert len(asked) <= LOOKAHEAD
    assert len(asked) <= HEAD * clients


def test_blocked_requests_are_not_tried_before_they_are_ready():
    queue = make_queue()
    reqs = [make_req(i) for i in range(200)]
    for req in reqs:
        queue.arrive(req)
    for req in reqs[:150]:
        queue.block(req, ReqStatus.WAITING_FOR_ENCODER)
    queue.check()
    assert tries(queue)[0] is reqs[150]
    asked = []
    queue.unblock(lambda req: asked.append(req) or req.arrival in (3, 5))
    assert asked == reqs[: len(asked)]
    assert len(asked) < 100
    assert tries(queue)[:3] == [reqs[3], reqs[5], reqs[150]]


def test_those_that_wait_for_the_encoder_do_not_hold_up_others_that_are_ready():
    queue = make_queue()
    reqs = [make_req(i) for i in range(200)]
    for req in reqs:
        queue.arrive(req)
        queue.block(req, ReqStatus.WAITING_FOR_REMOTE_KV if req.arrival == 150 else ReqStatus.WAITING_FOR_ENCODER)
    queue.unblock(lambda req: req.status is ReqStatus.WAITING_FOR_REMOTE_KV)
    assert tries(queue) == [reqs[150]]
    queue.check()
