"""The standing of servers: each one's results decide whether it gets requests, and how many."""

from __future__ import annotations

import math
from collections.abc import Sequence

_MOST_FAILURES = 3  # failed requests in a row
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_NEWEST_SHARE = 0.1  # weight of the newest answer in the mean duration
_ANSWERS_FOR_ROOM = 4  # answers per allowed request, until a busy server may have one more


class ServerStanding:
    """The standing of one server. After several failures in a row it is left out for a pause, which grows each time.

    It returns on trial, with one request at a time until it has answered one. Results of requests from before its
    return do not count. A busy server is left out as well. Afterwards it gets half as many requests at a time, and then
    slowly more.
    is_in: it may get requests. is_unfit: it will never get any. fitted: its list of models has the right one.
    answer_s: mean seconds of recent answers.
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
        self._alive_since = 0  # an era; earlier requests are not counted as outstanding
        self._on_trial = False
        self._one_at_a_time = False
        self._limit = math.inf  # requests at a time; a number once it was busy
        self._failed: set[int] = set()
        self._setbacks = 0

    @property
    def works(self) -> bool:
        """True if it gets requests and probably answers them."""
        return self.is_in and not self._on_trial

    @property
    def has_room(self) -> bool:
        """True if it may get a request now."""
        return self.is_in and self.outstanding < (1 if self._one_at_a_time else self._limit)

    def take(self) -> int:
        """Count a new request. Returns the era for its result. An era ends when the server is left out."""
        self.outstanding += 1
        return self.era

    def release(self, era: int) -> None:
        """Count a request as over, whatever its result."""
        if era >= self._alive_since:
            self.outstanding -= 1

    def answered(self, era: int, seconds: float | None) -> None:
        """Note an answer. seconds: of a caption; None for a refused request, which takes no time."""
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
        """Note a failure. Returns True if the server is to be left out. Failures of one request count once."""
        if era != self.era or not self.is_in:
            return False
        if self._on_trial and request in self._failed:
            self._setbacks -= 1  # the same request again: the pause does not grow
        self._failed.add(request)
        return self._on_trial or len(self._failed) >= _MOST_FAILURES

    def leave_out(self, reason: str, *, at_least_s: float = 0.0, busy: bool = False) -> float:
        """Leave the server out. Returns the seconds of the pause."""
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
        """Return the next pause. Pauses grow until the server has answered a request."""
        self._setbacks += 1
        return max(at_least_s, min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(self._setbacks - 1, 30)))

    def come_back(self) -> None:
        """Let the server have requests again."""
        self.is_in = True

    def give_up(self, reason: str) -> None:
        """Never use the server again."""
        self.reason = reason
        self.is_in, self.is_unfit = False, True

    def note(self) -> str | None:
        """Return a sentence for the user at the end of the run, if there is anything to report."""
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
    """Choose the server of the next request, preferring servers that have not tried it yet.

    The one with the least work is chosen: outstanding requests times the mean duration. So a slower server gets fewer
    requests, and an idle one always some.
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
