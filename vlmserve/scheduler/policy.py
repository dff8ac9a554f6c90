"""The order in which waiting requests are tried for admission."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import numpy as np


class Waiting(Protocol):
    """What ordering needs to know of a request. arrival: counts requests as they come, and never changes."""

    rid: str
    arrival: int


R = TypeVar("R", bound=Waiting)

LPM_MAX_QUEUE = 128
"""In longer queues longest-prefix-match costs more than it saves: first come, first served."""


class InBatchPrefixes(Generic[R]):
    """Finds waiting requests that had better wait for another one's prefix than compute it beside that one.

    Requests that share min_shared or more tokens (or a page, if larger) which are not cached yet, such as the `n`
    answers to one picture: the first goes ahead, the others find its prefix in the cache a step later. Pointless
    where prefixes are not cached.

    key: a request's prefix cache key, int64, as `match` looks it up. lookahead: how many requests from the front of
    the queue are examined; those behind are left alone.
    """

    def __init__(
        self, key: Callable[[R], np.ndarray], page_size: int, *, min_shared: int = 32, lookahead: int = 64
    ) -> None:
        self._key = key
        self._shared = max(min_shared, page_size)
        self._lookahead = lookahead

    def split(self, queue: list[R], match: Callable[[R], int]) -> tuple[list[R], list[R]]:
        """(go ahead, wait), each in the queue's order. match: cached tokens of a request. The first never waits."""
        ahead: list[R] = []
        wait: list[R] = []
        # Requests whose next uncached tokens are equal, from an equal offset on, are compared as a whole.
        leaders: dict[tuple[int, bytes], list[np.ndarray]] = {}
        for req in queue[: self._lookahead]:
            key, cached = self._key(req), match(req)
            if len(key) - cached < self._shared:
                ahead.append(req)
                continue
            group = leaders.setdefault((cached, key[cached : cached + self._shared].tobytes()), [])
            if any(np.array_equal(leader[:cached], key[:cached]) for leader in group):
                wait.append(req)
            else:
                group.append(key)
                ahead.append(req)
        return ahead + queue[self._lookahead :], wait


class SchedulePolicy(Generic[R]):
    """Sorts the waiting queue.

    policy: "fcfs", by arrival (a retracted request is older than those that came after it, so it is first again);
    or "lpm", most cached tokens first and then by arrival. match: cached tokens of a request; must change nothing.
    in_batch: None lets requests with a common prefix go side by side.
    """

    def __init__(self, policy: str, match: Callable[[R], int], in_batch: InBatchPrefixes[R] | None = None) -> None:
        if policy not in ("fcfs", "lpm"):
            raise ValueError(f"no schedule policy {policy!r}, only 'fcfs' and 'lpm' (--schedule-policy)")
        self.policy = policy
        self._match = match
        self._in_batch = in_batch

    def calc_priority(self, waiting_queue: list[R]) -> int:
        """Sort `waiting_queue` in place, first to be admitted first.

        Returns how many requests from the front to try in this step: those behind had better wait for the prefix of
        one of these (see `InBatchPrefixes`). At least 1 unless the queue is empty.
        """
        known: dict[int, int] = {}

        def match(req: R) -> int:
            if id(req) not in known:
                known[id(req)] = self._match(req)
            return known[id(req)]

        waiting_queue.sort(key=lambda req: req.arrival)
        if self.policy == "lpm" and len(waiting_queue) <= LPM_MAX_QUEUE:
            waiting_queue.sort(key=match, reverse=True)  # stable, also in reverse
        if self._in_batch is None:
            return len(waiting_queue)
        ahead, wait = self._in_batch.split(waiting_queue, match)
        waiting_queue[:] = ahead + wait
        return len(ahead)
