"""Servers that caption: what their answers mean, and the standing that decides which of them is asked next."""

from __future__ import annotations

import contextlib
import email.utils
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from vlmserve.commands.client.chat_client import error_in, json_or_none
from vlmserve_common.errors import BadRequestError

_SHOWN_CHARS = 300
_BROKEN_OFF = ("abort", "error")  # finish reasons after which the text is incomplete


@dataclass(frozen=True, kw_only=True, slots=True)
class Away:
    """The server takes no requests at the moment. This says nothing about the request.

    retry_after_s: the wait that it asks for. busy: it works, but has too many requests.
    """

    reason: str
    retry_after_s: float = 0.0
    busy: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class NoAnswer:
    """There is no caption, because of the server or the request."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfit:
    """The server refuses the API key, or lacks the model. for_good: waiting would not help."""

    reason: str
    for_good: bool = False


Verdict: TypeAlias = dict[str, Any] | BadRequestError | Away | NoAnswer | Unfit


def judge_answer(
    status: int,
    headers: Mapping[str, str],
    content: bytes,
    *,
    wanted: int,
    read: Callable[[Any, bytes, int], dict[str, Any] | NoAnswer] | None = None,
) -> Verdict:
    """Judge an answer to POST /chat/completions. wanted: number of choices in the request.

    A good one is returned as a chat.completion whose choices all have text, and a finish_reason that may be None.
    read: reads the good answers of another endpoint, given their JSON, their bytes, and `wanted`.
    """
    body = json_or_none(content)
    reason = _reason(status, headers, body, content)
    error = error_in(body)
    match status:
        case 200:
            return (read or _completion)(body, content, wanted)
        case 401:
            return Unfit(reason=f"it refuses the API key, {reason}; set --api-key", for_good=True)
        case 403:
            return Unfit(reason=f"it refuses the API key or the request, {reason}; see --api-key")
        case 402 | 503:
            return Away(reason=reason, retry_after_s=_retry_after_s(headers))
        case 429:
            return Away(reason=reason, retry_after_s=_retry_after_s(headers), busy=True)
        case 404 if error.get("param", "").startswith("messages"):
            return _bad_request(status, error, reason)  # an uploaded file
        case 404 if error:
            return Unfit(reason=reason)
        case _ if status in (400, 413, 422) or (400 <= status < 500 and status != 408 and error):
            return _bad_request(status, error, reason)
    return NoAnswer(reason=reason)


def judge_models(status: int, headers: Mapping[str, str], content: bytes) -> tuple[str, ...] | Away | Unfit:
    """Judge an answer to GET /models; returns the names of the served models."""
    body = json_or_none(content)
    reason = _reason(status, headers, body, content)
    if status in (401, 403):
        return Unfit(reason=f"it refuses the API key, {reason}; set --api-key", for_good=True)
    if 300 <= status < 500 and status not in (408, 429):
        return Unfit(reason=f"{reason}; --base-url is the address of an OpenAI-compatible server")
    if status != 200:
        return Away(reason=reason, retry_after_s=_retry_after_s(headers))
    with contextlib.suppress(TypeError, KeyError):
        if names := tuple(str(model["id"]) for model in body["data"]):
            return names
    return Away(reason=f"its list of models is not as in OpenAI's API: {_beginning(content) or 'nothing'}")


def _completion(body: Any, content: bytes, wanted: int) -> dict[str, Any] | NoAnswer:
    if not isinstance(body, dict):
        return NoAnswer(reason=f"an answer that is not a JSON object: {_beginning(content) or 'nothing'}")
    if not body.get("choices") and error_in(body):
        return NoAnswer(reason=f"HTTP 200 with an error: {error_in(body).get('message', '')[:_SHOWN_CHARS]}")
    try:
        choices = [_choice(index, choice) for index, choice in enumerate(body["choices"])]
    except (TypeError, KeyError, ValueError, AttributeError):
        choices = []
    if not choices:
        return NoAnswer(reason=f"an answer that is no chat completion: {_beginning(content)}")
    broken_off = next((choice for choice in choices if choice["finish_reason"] in _BROKEN_OFF), None)
    if broken_off is not None:
        return NoAnswer(reason=f"the answer was broken off (finish_reason {broken_off['finish_reason']!r})")
    answer = {**body, "choices": choices, "usage": _usage(body.get("usage"))}
    if len(choices) < wanted:
        given = body.get("warnings")
        too_few = f"the server gave {len(choices)} of {wanted} answers that were asked for (n)"
        answer["warnings"] = [*(given if isinstance(given, list) else []), too_few]
    return answer


def _usage(given: Any) -> dict[str, Any]:
    """Return the numbers of a usage object, and of the objects in it."""
    if not isinstance(given, Mapping):
        return {}
    return {
        name: _usage(value) if isinstance(value, Mapping) else value
        for name, value in given.items()
        if isinstance(value, Mapping) or (isinstance(value, int) and not isinstance(value, bool))
    }


def _choice(index: int, choice: Mapping[str, Any]) -> dict[str, Any]:
    message = choice["message"]
    text = message.get("content")
    if text is None:
        text = ""
    if isinstance(text, list):
        text = "".join(part["text"] for part in text if part.get("type") == "text")
    if not isinstance(text, str):
        raise ValueError("content is no text")
    finish_reason = choice.get("finish_reason")
    return {"index": index, **choice, "message": {**message, "content": text}, "finish_reason": finish_reason}


def _bad_request(status: int, error: Mapping[str, Any], reason: str) -> BadRequestError:
    message = error.get("message") or reason
    code = error.get("code") or error.get("type") or None
    return BadRequestError(message, param=error.get("param") or None, code=code, status=status)


def _reason(status: int, headers: Mapping[str, str], body: Any, content: bytes) -> str:
    told = error_in(body).get("message", "")[:_SHOWN_CHARS] or _beginning(content)
    if 300 <= status < 400:
        told = f"a redirect to {headers.get('location', 'nowhere')[:_SHOWN_CHARS]}, which is not followed"
    return f"HTTP {status}: {told}" if told else f"HTTP {status}"


def _beginning(content: bytes) -> str:
    """Return the first words of an unknown answer, such as a proxy's page."""
    return " ".join(content[:_SHOWN_CHARS].decode(errors="replace").split())[:80]


def _retry_after_s(headers: Mapping[str, str]) -> float:
    value = headers.get("retry-after", "").strip()
    if value.isascii() and value.replace(".", "", 1).isdecimal():
        return float(value[:12])
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0


_MOST_FAILURES = 3  # failed requests in a row
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 30.0
_NEWEST_SHARE = 0.1  # weight of the newest answer in the mean duration
_ANSWERS_FOR_ROOM = 4  # answers per allowed request, until a busy server may have one more


@dataclass(eq=False)
class ServerStanding:
    """The standing of one server. After several failures in a row it is left out for a pause, which grows each time.

    It returns on trial, with one request at a time until it has answered one. Results of requests from before its
    return do not count. A busy server is left out as well. Afterwards it gets half as many requests at a time, and then
    slowly more.
    is_in: it may get requests. is_unfit: it will never get any. fitted: its list of models has the right one.
    answer_s: mean seconds of recent answers.
    """

    url: str
    reason: str = ""
    times_left_out: int = 0
    times_busy: int = 0
    sent_again: int = 0
    is_in: bool = True
    is_unfit: bool = False
    fitted: bool = False
    era: int = 0
    outstanding: int = 0
    answer_s: float | None = None
    _alive_since: int = 0  # an era; earlier requests are not counted as outstanding
    _on_trial: bool = False
    _one_at_a_time: bool = False
    _limit: float = math.inf  # requests at a time; a number once it was busy
    _failed: set[int] = field(default_factory=set)
    _setbacks: int = 0

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
