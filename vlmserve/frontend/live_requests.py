"""The requests that have not ended: limited in number, no two with one id, each of which can be ended at any point."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from vlmserve_common.errors import BadRequestError, EngineError

_T = TypeVar("_T")
_Result = TypeVar("_Result")

_REMEMBERED = 64
_LONGEST_S = 3600


async def take_all(items: asyncio.Queue[_T]) -> list[_T]:
    """Return all items, oldest first, as soon as there is one. May be cancelled; nothing is lost then."""
    taken = [await items.get()]
    while not items.empty():
        taken.append(items.get_nowait())
    return taken


class FinishRate:
    """The rate at which answers end. All times come from one clock, in seconds. Idle times do not count: see
    `begin`."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=_REMEMBERED)
        self._since = 0.0

    def begin(self, now: float) -> None:
        """Start anew after an idle time, whose rate would tell nothing."""
        self._ends.clear()
        self._since = now

    def note(self, now: float) -> None:
        """Note the end of an answer."""
        if len(self._ends) == _REMEMBERED:
            self._since = self._ends[0]
        self._ends.append(now)

    def seconds_for(self, answers: int, now: float) -> int:
        """Estimate the time until so many answers have ended: whole seconds, at least 1, at most an hour.

        If none has ended yet, the first one is expected to take as long again as it has taken so far.
        """
        seconds = answers * (now - self._since) / max(1, len(self._ends))
        return min(max(1, math.ceil(seconds)), _LONGEST_S)


class RequestTimeoutError(EngineError):
    """The time that a request had is over; the status is 504."""


class RequestAbortedError(EngineError):
    """An operator ended a request; the status is 499, so that clients do not try again by themselves."""


@dataclass(slots=True, eq=False)
class LiveRequest(Generic[_T]):
    """A request that has not ended. request_id: the id that its client sees. n: number of answers. started: its
    arrival. rids: the answers that the scheduler has.

    outputs: read by the task that serves the client; an exception among them ends it. timer: ends an overdue request.
    is_inside: it has passed the door.
    """

    request_id: str
    n: int
    started: float
    outputs: asyncio.Queue[_T | Exception] = field(default_factory=asyncio.Queue)
    rids: list[str] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None
    is_inside: bool = False
    _ended: Exception | None = None
    _work: asyncio.Timeout | None = None

    async def interruptible(self, work: Awaitable[_Result]) -> _Result:
        """Await the work and return its result. `end` cancels the work and raises its own error instead."""
        try:
            async with asyncio.timeout(None) as self._work:
                result = await work
        except TimeoutError:
            if self._ended is None:
                raise
            raise self._ended from None
        finally:
            self._work = None
        if self._ended is not None:  # too late to interrupt the work, and nobody would say so again
            raise self._ended
        return result

    def end(self, error: Exception) -> None:
        """Raise an error in the task that works for the request or reads its outputs. Only the first error counts."""
        if self._ended is not None:
            return
        self._ended = error
        if self._work is not None:
            self._work.reschedule(asyncio.get_running_loop().time())
        else:
            self.outputs.put_nowait(error)


class LiveRequests(Generic[_T]):
    """All requests that have not ended, in one event loop. This is the only gate that answers 429 for a full queue.

    num_pending counts the answers that wait, run or are being prepared, and max_pending limits them. A request may take
    timeout_s; 0 is no limit. The clock is in seconds.
    """

    def __init__(self, max_pending: int, *, timeout_s: float, clock: Callable[[], float]) -> None:
        self.num_pending = 0
        self._max_pending = max_pending
        self._timeout_s = timeout_s
        self._clock = clock
        self._by_id: dict[str, LiveRequest[_T]] = {}
        self._rate = FinishRate()

    @contextmanager
    def entered(self, request_id: str, n: int) -> Iterator[LiveRequest[_T]]:
        """Let in a request for n answers, until it has ended, one way or another.

        Raises BadRequestError if there are too many answers (429) or a request with the same id (409).
        """
        self._check_room(n)
        if request_id in self._by_id:
            raise BadRequestError(
                f"there is a request {request_id!r} already, which has not ended: give each an id of its own",
                param="rid",
                code="duplicate_request_id",
                status=409,
            )
        now = self._clock()
        if not self.num_pending:
            self._rate.begin(now)
        self.num_pending += n
        request: LiveRequest[_T] = LiveRequest(request_id=request_id, n=n, started=now)
        self._by_id[request_id] = request
        try:
            yield request
        finally:
            if request.timer is not None:
                request.timer.cancel()
            del self._by_id[request_id]
            self.num_pending -= n
            for _ in range(n):
                self._rate.note(self._clock())

    def limit_time(self, request: LiveRequest[_T], asked_s: float | None, end: Callable[[Exception], None]) -> None:
        """Call `end` once the request's time is over: the time it asked for, or the server's limit if that is less.
        Without either, do nothing."""
        limits = {"setting --request-timeout-s": self._timeout_s, "its timeout": asked_s}
        given = {name: seconds for name, seconds in limits.items() if seconds}
        if given:
            name = min(given, key=given.__getitem__)
            error = RequestTimeoutError(
                f"the request was not answered within {given[name]:g} s, and was ended ({name})"
            )
            request.timer = asyncio.get_running_loop().call_later(given[name], end, error)

    def find(self, request_id: str | None) -> list[LiveRequest[_T]]:
        """Return the request with an id, if there is one, or all of them for None."""
        if request_id is None:
            return list(self._by_id.values())
        found = self._by_id.get(request_id)
        return [] if found is None else [found]

    def retry_after_s(self) -> int:
        """Estimate the time until there is room for another answer, in whole seconds, at least 1."""
        too_many = self.num_pending + 1 - self._max_pending
        return self._rate.seconds_for(max(1, too_many), self._clock())

    def _check_room(self, n: int) -> None:
        if self.num_pending + n > self._max_pending:
            raise BadRequestError(
                f"{self.num_pending} answers are waiting or running and this request asks for {n}, the limit is "
                f"{self._max_pending} (setting --max-queued-requests); try again later",
                status=429,
                code="rate_limit_exceeded",
            )
