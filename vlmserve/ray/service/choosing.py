"""Which replica gets a request: the router of replicas with names, which come and go."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from vlmserve.routing.replicas import ANSWER_TOKENS, Demand, Method, ReplicaRouter

STARTED, REQUESTS = "started", "requests"
"""The figures that replicas report for routing: when each was started (Unix time), and its unfinished requests."""
# The load of a request whose prompt is not known.
_REQUEST_TOKENS = 2 * ANSWER_TOKENS


@dataclass(frozen=True, kw_only=True)
class Order:
    """A request on its way from a front to a replica.

    number: of the only replica that may answer, counted by age from 0, and over again; None: any may. avoid: replicas
    that did not answer it. scope: ASGI's.
    """

    demand: Demand
    number: int | None
    scope: Mapping[str, Any]
    body: bytes
    avoid: tuple[str, ...] = ()


class ReplicaChooser:
    """Ranks replicas for requests, by the work in flight at each and by what each has cached."""

    def __init__(self, method: Method = "affinity") -> None:
        self._router = ReplicaRouter(0, method=method)
        self._slots: dict[str, int] = {}
        self._started: dict[str, float] = {}
        self._in_flight: dict[str, str] = {}  # rid -> replica

    @property
    def num_in_flight(self) -> int:
        """Return the number of requests that have not ended: zero when idle."""
        return self._router.num_in_flight

    def update(self, figures: Mapping[str, Mapping[str, Any]]) -> None:
        """Note which replicas there are, and what each reports."""
        for name in self._slots.keys() - figures.keys():
            for rid in [rid for rid, at in self._in_flight.items() if at == name]:
                self.ended(rid)
            self._router.remove(self._slots.pop(name))
            del self._started[name]
        for name in sorted(figures.keys() - self._slots.keys()):
            self._slots[name] = self._router.add()
        for name, told in figures.items():
            self._started[name] = told.get(STARTED, math.inf)
            own = sum(at == name for at in self._in_flight.values())
            others = max(0, told.get(REQUESTS, 0) - own)
            self._router.told(self._slots[name], int(others) * _REQUEST_TOKENS)

    def ranked(self, order: Order, among: Collection[str]) -> list[str]:
        """Return replicas, the best one first, and count the request as in flight there. Serve may ask again for the
        same request, and gets the same best one. among: the choice, of which there is at least one."""
        names = [name for name in self._slots if name in among]
        if order.number is not None and names:
            names.sort(key=lambda name: (self._started[name], name))
            names = [names[order.number % len(names)]]
        names = [name for name in names if name not in order.avoid] or names
        if not names:
            return list(among)
        [rid] = order.demand.rids
        best = self._in_flight.get(rid, "")
        if best not in names:
            slots = {self._slots[name]: name for name in names}
            best = self._in_flight[rid] = slots[self._router.place(order.demand, list(slots))]
        loads = self._router.loads
        return [best, *sorted((name for name in names if name != best), key=lambda name: loads[self._slots[name]])]

    def went(self, order: Order, name: str) -> None:
        """Note which replica took a request, which may be another than the best one."""
        [rid] = order.demand.rids
        if name in self._slots and self._in_flight.get(rid) != name:
            self._router.place(order.demand, [self._slots[name]])
            self._in_flight[rid] = name

    def ended(self, rid: str) -> None:
        """Note the end of a request."""
        self._in_flight.pop(rid, None)
        self._router.end(rid)
