"""What a server's answer means: a caption, the request's fault, the server's, or that somebody else should be asked.

Servers are vlmserve, vLLM, SGLang, llama.cpp, OpenAI's own, and the proxies in front of them.
"""

from __future__ import annotations

import contextlib
import email.utils
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from vlmserve_common.errors import BadRequestError

_SHOWN_CHARS = 300
_BROKEN_OFF = ("abort", "error")  # finish reasons: what text there is, is not what the model would have said


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """content: a chat.completion. Every choice has a message with text, and a finish_reason, which may be None."""

    content: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Away:
    """The server takes no requests at the moment; nothing is known about this one.

    retry_after_s: how long it says to wait. busy: it works, but has too much to do.
    """

    reason: str
    retry_after_s: float = 0.0
    busy: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """No caption; the server or the request is the cause."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfit:
    """The server refuses the API key, or does not have what is wanted. for_good: waiting would not help."""

    reason: str
    for_good: bool = False


Outcome: TypeAlias = Answer | BadRequestError | Away | Failed | Unfit


def judge_answer(status: int, headers: Mapping[str, str], content: bytes, *, wanted: int) -> Outcome:
    """Of POST /chat/completions. wanted: choices asked for."""
    body = _json(content)
    reason = _reason(status, headers, body, content)
    error = _error(body)
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
        case 404 if _text(error.get("param")).startswith("messages"):
            return _bad_request(status, error, reason)  # an uploaded file
        case 404 if error:
            return Unfit(reason=reason)
        case _ if status in (400, 413, 422) or (400 <= status < 500 and status != 408 and error):
            return _bad_request(status, error, reason)
    return Failed(reason=reason)


def judge_models(status: int, headers: Mapping[str, str], content: bytes) -> tuple[str, ...] | Away | Unfit:
    """Of GET /models: the names of what is served."""
    body = _json(content)
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


def _completion(body: Any, content: bytes, wanted: int) -> Answer | Failed:
    if not isinstance(body, dict):
        return Failed(reason=f"an answer that is not a JSON object: {_beginning(content) or 'nothing'}")
    if not body.get("choices") and _error(body):
        return Failed(reason=f"HTTP 200 with an error: {_text(_error(body).get('message'))[:_SHOWN_CHARS]}")
    try:
        choices = [_choice(index, choice) for index, choice in enumerate(body["choices"])]
    except (TypeError, KeyError, ValueError, AttributeError):
        choices = []
    if not choices:
        return Failed(reason=f"an answer that is no chat completion: {_beginning(content)}")
    broken_off = next((choice for choice in choices if choice["finish_reason"] in _BROKEN_OFF), None)
    if broken_off is not None:
        return Failed(reason=f"the answer was broken off (finish_reason {broken_off['finish_reason']!r})")
    answer = {**body, "choices": choices, "usage": _usage(body.get("usage"))}
    if len(choices) < wanted:
        given = body.get("warnings")
        too_few = f"the server gave {len(choices)} of {wanted} answers that were asked for (n)"
        answer["warnings"] = [*(given if isinstance(given, list) else []), too_few]
    return Answer(content=answer)


def _usage(given: Any) -> dict[str, Any]:
    """Its numbers, and what details there are of them."""
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
    message = _text(error.get("message")) or reason
    code = _text(error.get("code")) or _text(error.get("type")) or None
    return BadRequestError(message, param=_text(error.get("param")) or None, code=code, status=status)


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def _error(body: Any) -> Mapping[str, Any]:
    """OpenAI's error object; also where it is the whole body, or mere text. Empty if there is none."""
    if not isinstance(body, dict):
        return {}
    found = body.get("error", body.get("detail", body if "message" in body else None))
    if isinstance(found, dict):
        return found
    return {"message": found if isinstance(found, str) else json.dumps(found)} if found else {}


def _reason(status: int, headers: Mapping[str, str], body: Any, content: bytes) -> str:
    told = _text(_error(body).get("message"))[:_SHOWN_CHARS] or _beginning(content)
    if 300 <= status < 400:
        told = f"a redirect to {headers.get('location', 'nowhere')[:_SHOWN_CHARS]}, which is not followed"
    return f"HTTP {status}: {told}" if told else f"HTTP {status}"


def _beginning(content: bytes) -> str:
    """What a user may know it by: a proxy's page, say."""
    return " ".join(content[:_SHOWN_CHARS].decode(errors="replace").split())[:80]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _retry_after_s(headers: Mapping[str, str]) -> float:
    """Of a number of seconds or a date; 0.0 if neither is there."""
    value = headers.get("retry-after", "").strip()
    if value.isascii() and value.replace(".", "", 1).isdecimal():
        return float(value[:12])
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0
