"""Judges the answers of servers: a caption, a bad request, a failing server, or a reason to ask another one.

Servers are vlmserve, vLLM, SGLang, llama.cpp, OpenAI's own, and the proxies in front of them.
"""

from __future__ import annotations

import contextlib
import email.utils
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from vlmserve.commands.client.chat_client import error_in, json_or_none
from vlmserve_common.errors import BadRequestError

_SHOWN_CHARS = 300
_BROKEN_OFF = ("abort", "error")  # finish reasons after which the text is incomplete


@dataclass(frozen=True, kw_only=True, slots=True)
class GoodAnswer:
    """A caption. content: a chat.completion whose choices all have text, and a finish_reason that may be None."""

    content: dict[str, Any]


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


Verdict: TypeAlias = GoodAnswer | BadRequestError | Away | NoAnswer | Unfit


def judge_answer(status: int, headers: Mapping[str, str], content: bytes, *, wanted: int) -> Verdict:
    """Judge an answer to POST /chat/completions. wanted: number of choices in the request."""
    body = json_or_none(content)
    reason = _reason(status, headers, body, content)
    error = error_in(body)
    match status:
        case 200:
            return _completion(body, content, wanted)
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


def _completion(body: Any, content: bytes, wanted: int) -> GoodAnswer | NoAnswer:
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
    return GoodAnswer(content=answer)


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
    """Return the seconds of a Retry-After header; 0.0 without one."""
    value = headers.get("retry-after", "").strip()
    if value.isascii() and value.replace(".", "", 1).isdecimal():
        return float(value[:12])
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0
