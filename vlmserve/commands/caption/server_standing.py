"""Whether a server gets requests, and how many: decided by what became of those it got."""

from __future__ import annotations

import math
from collections.abc import Sequence

_MOST_FAILURES = 3  # requests in a row
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_NEWEST_SHARE = 0.1  # of the newest answer in the mean time that answers take
_ANSWERS_FOR_ROOM = 4  # for each request that a busy server may have at a time, until it gets one more


class ServerStanding:
    """A server that fails again and again is left out for a pause, which grows from time to time.

    It comes back on trial: with one request at a time, until it has answered one. What becomes of requests from before
    says nothing about it then. A busy one is left out as well, and gets half as many at a time afterwards, then slowly
    more.
    Requests are known by numbers. is_in: it may get requests. is_unfit: it will never get any. fitted: its list of
    models was seen, with the right one in it. answer_s: the seconds that an answer takes of late.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.reason = ""
        self.times_left_out = 0
        self.times_busy = 0
        self.sent_again = 0
        self.is_in = True
        self.is_unfit = False
        self.fitted = False
        self.era = 0
        self.outstanding = 0
        self.answer_s: float | None = None
        self._alive_since = 0  # an era; requests from before are not outstanding any more
        self._on_trial = False
        self._one_at_a_time = False
        self._limit = math.inf  # requests at a time; a number once it was busy
        self._failed: set[int] = set()
        self._setbacks = 0

    @property
    def works(self) -> bool:
        """It gets requests and, as far as is known, answers them."""
        return self.is_in and not self._on_trial

    @property
    def has_room(self) -> bool:
        """It may get a request now."""
        return self.is_in and self.outstanding < (1 if self._one_at_a_time else self._limit)

    def take(self) -> int:
        """It gets a request. Returns the era, for what becomes of the request: eras end when it is left out."""
        self.outstanding += 1
        return self.era

    def release(self, era: int) -> None:
        """The request is over, in whatever way."""
        if era >= self._alive_since:
            self.outstanding -= 1

    def answered(self, era: int, seconds: float | None) -> None:
        """It works. seconds: that a caption took; None where it refused the request, which it does quickly."""
        if seconds is not None:
            mean = seconds if self.answer_s is None else self.answer_s
            self.answer_s = mean + _NEWEST_SHARE * (seconds - mean)
        if era != self.era:
            return
        self._limit += 1 / (_ANSWERS_FOR_ROOM * self._limit)
        self._on_trial = self._one_at_a_time = False
        self._setbacks = 0
        self._failed.clear()

    def failed(self, era: int, request: int) -> bool:
        """It failed with a request. Whether it is to be left out: one request that always fails tells nothing."""
        if era != self.era or not self.is_in:
            return False
        if self._on_trial and request in self._failed:
            self._setbacks -= 1  # the same one again: the pause stays as it is
        self._failed.add(request)
        return self._on_trial or len(self._failed) >= _MOST_FAILURES

    def leave_out(self, reason: str, *, at_least_s: float = 0.0, busy: bool = False) -> float:
        """Returns for how many seconds."""
        self.reason = reason
        self.is_in = False
        self._on_trial = True
        self.era += 1
        if busy:
            self.times_busy += 1
            self._limit = max(1.0, self.outstanding / 2)
        else:
            self.times_left_out += 1
            self._alive_since = self.era
            self.outstanding = 0
            self._one_at_a_time = True
        return self.next_pause_s(at_least_s)

    def next_pause_s(self, at_least_s: float = 0.0) -> float:
        """Longer from time to time, until it has answered a request."""
        self._setbacks += 1
        return max(at_least_s, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(self._setbacks - 1, 30)))

    def come_back(self) -> None:
        """It may get requests again."""
        self.is_in = True

    def give_up(self, reason: str) -> None:
        """It cannot be used, for good."""
        self.reason = reason
        self.is_in, self.is_unfit = False, True

    def note(self) -> str | None:
        """What the user should know of it at the end, if anything."""
        if self.is_unfit:
            told = f"was not used: {self.reason}"
        elif self.times_left_out:
            told = f"was left out {_times(self.times_left_out, 'time')} (last: {self.reason})"
        elif self.times_busy:
            told = f"asked to wait {_times(self.times_busy, 'time')} ({self.reason})"
        else:
            return None
        again = f"; {_times(self.sent_again, 'request')} sent there went out again" if self.sent_again else ""
        return f"{self.url} {told}{again}"


def choose(servers: Sequence[ServerStanding], tried: Sequence[ServerStanding]) -> ServerStanding | None:
    """Who gets the next request: one that has not tried it yet, and of these who is soonest through with its work.

    That is outstanding requests times the time that each takes: a slower server gets fewer, an idle one always some.
    """
    free = [server for server in servers if server.has_room]
    free = [server for server in free if server not in tried] or free
    known = [server.answer_s for server in servers if server.answer_s is not None]
    guess = min(known, default=1.0)

    def work_s(server: ServerStanding) -> tuple[float, float]:
        each_s = guess if server.answer_s is None else server.answer_s
        return server.outstanding * each_s, each_s

    return min(free, key=work_s, default=None)


def _times(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
