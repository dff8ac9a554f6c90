"""The id of a request in its headers, its answer, every process's log, and traces.

A client's own `X-Request-Id` is kept if it is plain; otherwise the server makes one. Inside the server a request has an
id of its own that contains it, since two clients may send the same.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable

from starlette.requests import Request

from vlmserve_common.logs import request_id

HEADER = "X-Request-Id"
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


def given_id(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return the client's id, from raw headers. None if there is none, or if it cannot stand in a log as it is."""
    value = next((value for name, value in headers if name.lower() == HEADER.lower().encode()), b"")
    text = value.decode("latin-1")
    return text if _PLAIN.fullmatch(text) else None


def new_id(kind: str) -> str:
    """Return a new, unique id."""
    return f"{kind}-{uuid.uuid4().hex}"


def name_answer(request: Request, kind: str, rid: str | None = None) -> str:
    """Return a new id for a request's answer. The log shows it from here on, unless the client gave an id, in its
    header or as the request's `rid`."""
    given = getattr(request.state, "given_request_id", None)
    called = given or rid
    name = new_id(kind) if called is None else f"{kind}-{called}-{uuid.uuid4().hex[:8]}"
    if given is None:
        request.state.request_id = rid or name
        request_id.set(rid or name)
    return name
