"""The waiting requests, and the order in which they are tried: flows in turns, and by the policy within a flow.

A flow is a client's requests with media, or its requests without. Flows are served by virtual token counters (Sheng et
al., "Fairness in Serving Large Language Models", 2024). The tokens that a flow was given are added to its counter, and
the least served flow goes first. A flow that was idle begins at the counter of the least served one. So a client does
not wait for another one that sends much, and text does not wait for pictures.

Trying costs the same however many requests wait: there is a sorted list for each flow, a heap of flows, and a bounded
number of tries. Blocked requests (see `ReqStatus`) are kept apart and are tried again later.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from itertools import count

from vlmserve.scheduler.decode_gap import FlowLoad
from vlmserve.scheduler.policy import HEAD, Key, SchedulePolicy
from vlmserve.scheduler.req import Req
from vlmserve.scheduler.req_life import ReqStatus

LOOKAHEAD = 128
"""So many requests are tried in one step at the most, and so many keys are computed anew."""
MISSES = 16
"""After so many tries without success a flow is passed over for the rest of a step, and leaves tries to other flows."""
_ASKED = 64
"""So many blocked requests of each kind are looked at in one step."""

_REMEMBERED = 4096
"""So many counters of flows without requests are kept."""


@dataclass(eq=False, slots=True)
class _Flow:
    """The requests of one flow.

    waiting: (key, arrival, request), sorted; by turn if the policy's keys are not static. size: requests of the flow,
    wherever they are. encoding: those that wait for the encoder. queued: the flow is in the heap of flows.
    """

    name: str
    counter: float = 0.0
    in_progress: list[Req] = field(default_factory=list)
    waiting: list[tuple[Key, int, Req]] = field(default_factory=list)
    size: int = 0
    encoding: int = 0
    queued: bool = False


class WaitingQueue:
    """Requests that wait, and requests whose prompts are in progress. These are tried first within their flow."""

    def __init__(self, policy: SchedulePolicy) -> None:
        self._policy = policy
        self._flows: dict[str, _Flow] = {}
        self._heap: list[tuple[float, int, _Flow]] = []
        self._tickets = count()
        self._counters: dict[str, float] = {}  # counters of flows without requests
        self._least = 0.0  # the highest counter at which a flow was tried
        # each kind in the order in which they are unblocked: the encoder's order, or by arrival
        self._blocked: dict[ReqStatus, list[tuple[int, int, Req]]] = {}
        self._waiting = 0  # requests that are not blocked
        self._in_progress = 0
        self._ranked = 0  # in this visit

    def __len__(self) -> int:
        """Return how many requests wait; prompts in progress do not count."""
        return self._waiting + sum(map(len, self._blocked.values()))

    def __iter__(self) -> Iterator[Req]:
        yield from (req for flow in self._flows.values() for _, _, req in flow.waiting)
        yield from (req for blocked in self._blocked.values() for _, _, req in blocked)

    def loads(self, running: Sequence[Req], most: int) -> list[FlowLoad]:
        """Return the load of each flow with requests that decode. most: places for running requests; if all are taken,
        no request joins."""
        flows = {req.flow: (self._flows[req.flow], req.unattended) for req in running}
        full = len(running) >= most
        return [
            FlowLoad(0 if full else flow.encoding + len(flow.in_progress), unattended)
            for flow, unattended in flows.values()
        ]

    def has_ready_prompt(self) -> bool:
        """Return True if a prompt may go on without the encoder, as far as is known."""
        return self._waiting > 0 or any(
            not req.awaits_kv and req.media.ready_until(req.kv_len) is None for req in self.in_progress
        )

    @property
    def in_progress(self) -> list[Req]:
        """Return the requests whose prompts are computed in part, oldest first."""
        if not self._in_progress:
            return []
        return sorted((req for flow in self._flows.values() for req in flow.in_progress), key=lambda req: req.arrival)

    def first(self) -> Req:
        """Return the oldest among the first requests of each flow and of each kind of blocked ones. ValueError if none
        waits."""
        heads = [flow.waiting[0][2] for flow in self._flows.values() if flow.waiting]
        heads += [blocked[0][2] for blocked in self._blocked.values() if blocked]
        return min(heads, key=lambda req: req.arrival)

    # ------------------------------------------------------------ coming and going

    def arrive(self, req: Req) -> None:
        """Add a new request, whose flow is active until `leave`."""
        flow = self._flows.get(req.flow)
        if flow is None:
            flow = self._flows[req.flow] = _Flow(req.flow, self._counters.pop(req.flow, 0.0))
        flow.size += 1
        self.add(req)

    def leave(self, req: Req) -> None:
        """Remove a request that has ended, wherever it is."""
        flow = self._flows[req.flow]
        if req.status.is_queued:
            self.remove(req)
        elif req in flow.in_progress:
            self.set_in_progress(req, False)
        flow.size -= 1
        if not flow.size:
            del self._flows[req.flow]
            self._remember(flow)

    def add(self, req: Req) -> None:
        """Let a request wait, for the first time or again. Its flow may have been idle for a while."""
        flow = self._flows[req.flow]
        if not flow.waiting and not flow.in_progress:
            flow.counter = max(flow.counter, self._least)
        insort(flow.waiting, (*self._place(req), req), key=lambda entry: entry[:2])
        self._waiting += 1
        self._enqueue(flow)

    def remove(self, req: Req) -> None:
        """Remove a request that waits no longer."""
        if req.status.is_blocked:
            del self._blocked[req.status][self._blocked_at(req)]
            self._flows[req.flow].encoding -= req.status is ReqStatus.WAITING_FOR_ENCODER
            return
        flow = self._flows[req.flow]
        at = bisect_left(flow.waiting, self._place(req), key=lambda entry: entry[:2])
        assert flow.waiting[at][2] is req, req.rid
        del flow.waiting[at]
        self._waiting -= 1

    def block(self, req: Req, status: ReqStatus) -> None:
        """Keep a waiting request apart, and give it this status, until `unblock` finds it ready."""
        self.remove(req)
        req.move_to(status)
        insort(self._blocked.setdefault(status, []), (*_turn_blocked(req), req), key=lambda entry: entry[:2])
        self._flows[req.flow].encoding += status is ReqStatus.WAITING_FOR_ENCODER

    def unblock(self, is_ready: Callable[[Req], bool]) -> None:
        """Let the first of the blocked requests wait again, if they are ready. Of requests that wait for a grammar, all
        are asked: grammars do not come in the order of arrival."""
        asked = (
            blocked if status is ReqStatus.WAITING_FOR_GRAMMAR else blocked[:_ASKED]
            for status, blocked in self._blocked.items()
        )
        ready = [req for blocked in asked for _, _, req in blocked if is_ready(req)]
        for req in ready:
            self.remove(req)
            req.move_to(ReqStatus.WAITING)
            self.add(req)

    def set_in_progress(self, req: Req, on: bool) -> None:
        """Note whether the prompt of a request goes on with another step."""
        flow = self._flows[req.flow]
        if on:
            insort(flow.in_progress, req, key=lambda other: other.arrival)
            self._in_progress += 1
            self._enqueue(flow)
        else:
            flow.in_progress.remove(req)
            self._in_progress -= 1

    def charge(self, req: Req, cost: float) -> None:
        """Add so much to the counter of a request's flow."""
        self._flows[req.flow].counter += cost

    def _place(self, req: Req) -> tuple[Key, int]:
        return (self._policy.keys([req])[0] if self._policy.static else (req.turn,)), req.arrival

    def _blocked_at(self, req: Req) -> int:
        blocked = self._blocked[req.status]
        at = bisect_left(blocked, _turn_blocked(req), key=lambda entry: entry[:2])
        assert blocked[at][2] is req, req.rid
        return at

    def _enqueue(self, flow: _Flow) -> None:
        if not flow.queued:
            flow.queued = True
            heappush(self._heap, (flow.counter, next(self._tickets), flow))

    def _remember(self, flow: _Flow) -> None:
        self._counters[flow.name] = flow.counter
        if len(self._counters) > _REMEMBERED:
            del self._counters[next(iter(self._counters))]

    # ------------------------------------------------------------ trying

    def visit(self, attempt: Callable[[Req], bool]) -> None:
        """Try requests in order, until `attempt` returns False, all were tried, or `LOOKAHEAD` were.

        A try for which the flow is not charged is a miss: after `MISSES` of them the flow is passed over. `attempt` may
        take the request out of the queue, block it, put it in progress, or charge its flow.
        """
        passed: list[_Flow] = []
        tries: dict[str, Iterator[Req]] = {}
        misses = Counter[str]()
        self._ranked = 0
        for _ in range(LOOKAHEAD):
            flow = self._least_served()
            if flow is None:
                break
            if flow.name not in tries:
                tries[flow.name] = iter(self._candidates(flow))
            req = next(tries[flow.name], None) if misses[flow.name] < MISSES else None
            if req is None:
                heappop(self._heap)
                passed.append(flow)
                continue
            before = flow.counter
            self._least = max(self._least, before)
            if not attempt(req):
                break
            misses[flow.name] += flow.counter == before
        for flow in passed:
            flow.queued = False
            if flow.waiting or flow.in_progress:
                self._enqueue(flow)

    def _least_served(self) -> _Flow | None:
        """Return the least served flow. Counters only grow, so a stale one in the heap is at worst too low."""
        while self._heap:
            counter, _, flow = self._heap[0]
            if not flow.waiting and not flow.in_progress:
                heappop(self._heap)
                flow.queued = False
            elif counter < flow.counter:
                heapreplace(self._heap, (flow.counter, next(self._tickets), flow))
            else:
                return flow
        return None

    def _candidates(self, flow: _Flow) -> list[Req]:
        if self._policy.static:
            head = [req for _, _, req in flow.waiting[:LOOKAHEAD]]
        else:  # with many flows, the last ones are not ranked
            head = [req for _, _, req in flow.waiting[: max(min(HEAD, LOOKAHEAD - self._ranked), 1)]]
            self._ranked += len(head)
            if len(head) > 1:
                keys = self._policy.keys(head)
                head = [head[at] for at in sorted(range(len(head)), key=keys.__getitem__)]
        return [*(req for req in flow.in_progress if not req.awaits_kv), *head]

    def check(self) -> None:
        """Assert that counts and orders are right; for tests."""
        assert self._waiting == sum(len(flow.waiting) for flow in self._flows.values())
        assert self._in_progress == sum(len(flow.in_progress) for flow in self._flows.values())
        for status, blocked in self._blocked.items():
            assert all(req.status is status and _turn_blocked(req) == (turn, at) for turn, at, req in blocked)
            assert [entry[:2] for entry in blocked] == sorted(entry[:2] for entry in blocked)
        assert not any(req.status.is_blocked for flow in self._flows.values() for _, _, req in flow.waiting)
        assert all(flow.queued for flow in self._flows.values() if flow.waiting or flow.in_progress)


def _turn_blocked(req: Req) -> tuple[int, int]:
    order = req.media.order if req.status is ReqStatus.WAITING_FOR_ENCODER else req.arrival
    return order, req.arrival
