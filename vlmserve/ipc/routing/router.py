"""Chooses a replica for each request: by what is in flight at each, and by what each has cached.

Where a prompt's beginning, or its pictures, were sent before, most of it is there already. So the best match wins, as
long as it saves a good part of the work, and its replica has not much more to do than the one that has least.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

from vlmserve.ipc.routing.demand import BLOCK_TOKENS, Demand
from vlmserve.ipc.routing.known import MOST_KEYS, KnownKeys

Method = Literal["affinity", "round_robin", "shortest_queue"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """worth: part of a request's work that a match must save. A match's replica may have `apart_tokens` more in flight
    than the one with least, or `apart_times` as much, whichever is more."""

    worth: float = 0.5
    apart_tokens: int = 4096
    apart_times: float = 1.5


class Router:
    """Of `size` replicas. The same calls always lead to the same choices. Not thread-safe.

    most_keys, most_sessions: that are remembered; those used least recently are forgotten first.
    """

    def __init__(
        self,
        size: int,
        *,
        method: Method = "affinity",
        balance: Balance = Balance(),
        most_keys: int = MOST_KEYS,
        most_sessions: int = 2**14,
    ) -> None:
        self.size = size
        self._method = method
        self._balance = balance
        self._known = KnownKeys(size, most=most_keys)
        self._most_sessions = most_sessions
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self._in_flight: dict[str, tuple[int, int]] = {}  # rid -> replica, tokens
        self._loads = [0] * size
        self._placed = [0] * size
        self._turn = 0

    @property
    def loads(self) -> tuple[int, ...]:
        """Tokens in flight at each replica: of prompts, without what was matched, and about those of answers."""
        return tuple(self._loads)

    @property
    def placed(self) -> tuple[int, ...]:
        """Requests that each replica got since the start."""
        return tuple(self._placed)

    @property
    def num_in_flight(self) -> int:
        """Answers that have not ended: zero when idle."""
        return len(self._in_flight)

    def place(self, demand: Demand) -> int:
        """The replica for a request, which is in flight there from now on."""
        saved = self._saved(demand)
        replica = self._choose(demand, saved)
        self._known.sent(demand.prefix, replica)
        self._known.sent((digest for digest, _ in demand.media), replica)
        if demand.session:
            self._remember(demand.session, replica)
        tokens = demand.work - saved[replica] + demand.answer
        for index, rid in enumerate(demand.rids):  # all answers to a prompt end apart
            share = tokens * (index + 1) // len(demand.rids) - tokens * index // len(demand.rids)
            self.end(rid)
            self._in_flight[rid] = replica, share
            self._loads[replica] += share
        self._placed[replica] += 1
        return replica

    def replica_of(self, rid: str) -> int | None:
        """Where an answer is made; None: it has ended, or never was."""
        found = self._in_flight.get(rid)
        return None if found is None else found[0]

    def end(self, rid: str) -> None:
        """An answer is not in flight any more, if it was."""
        replica, tokens = self._in_flight.pop(rid, (0, 0))
        self._loads[replica] -= tokens

    def forget(self) -> None:
        """Caches are empty."""
        self._known.clear()

    def _choose(self, demand: Demand, saved: list[int]) -> int:
        if demand.replica is not None:
            return demand.replica
        if demand.session in self._sessions:
            return self._sessions[demand.session]
        if self._method == "round_robin":
            self._turn += 1
            return (self._turn - 1) % self.size
        idlest = min(range(self.size), key=self._busyness)
        if self._method == "shortest_queue":
            return idlest
        best = min(range(self.size), key=lambda replica: (-saved[replica], *self._busyness(replica)))
        limit = max(self._loads[idlest] + self._balance.apart_tokens, self._loads[idlest] * self._balance.apart_times)
        worth = saved[best] > 0 and saved[best] >= self._balance.worth * demand.work
        return best if worth and self._loads[best] <= limit else idlest

    def _busyness(self, replica: int) -> tuple[int, int, int]:
        # where nothing is in flight they take turns
        return self._loads[replica], self._placed[replica], replica

    def _saved(self, demand: Demand) -> list[int]:
        """Tokens of `Demand.work` that each replica has, as far as is known."""
        saved = [length * BLOCK_TOKENS for length in self._known.longest(demand.prefix)]
        for digest, tokens in demand.media:
            for replica in range(self.size):
                saved[replica] += tokens * self._known.has(digest, replica)
        return saved

    def _remember(self, session: str, replica: int) -> None:
        self._sessions[session] = replica
        self._sessions.move_to_end(session)
        if len(self._sessions) > self._most_sessions:
            self._sessions.popitem(last=False)
