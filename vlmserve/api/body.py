"""The body of a request as it arrives, and as a checked JSON object. The memory of all bodies is limited, and how much
there is in each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request

from vlmserve.config.settings import ServerSettings
from vlmserve.frontend.openai.json_bodies import checked, json_object
from vlmserve_common.errors import BadRequestError
from vlmserve_common.process.threads import Threads

_Model = TypeVar("_Model", bound=BaseModel)
# Bodies beyond either are parsed in a thread. Many small values take time, and a comma stands between two of them; a
# picture is one long text, which takes microseconds, less than a thread's start.
_INLINE_BYTES = 256 * 1024
_INLINE_COMMAS = 2000
# What may have many items, and what these may have many parts in. Lists of token ids are no such lists.
_LISTS = (
    *("messages", "input", "query", "prompt", "items", "labels", "tools"),
    *("texts", "images", "inputs", "documents", "text_1", "text_2"),
    *("text", "input_ids", "image_data"),
)
_PARTS = ("content", "output", "tool_calls")
FREE_BYTES = 64 * 1024
"""The bytes of a body that need no room, so that large, slow bodies keep no small requests out. --max-connections
limits these bytes."""


class BodyBudget:
    """Counts the bytes of all bodies. Room is taken as bytes arrive; a mere announcement costs a client nothing.

    parse_from: the monotonic time at which the next large body may be parsed.
    """

    def __init__(self, settings: ServerSettings, what: str = "the bodies of requests") -> None:
        self.held = 0
        self.parse_from = 0.0
        self._what = what
        self._most = int(max(settings.max_bodies_mib, settings.max_body_mib) * 2**20)

    def take(self, count: int) -> None:
        """Take room. Raises BadRequestError (503) if there is none."""
        if self.held + count > self._most:
            raise BadRequestError(
                f"{self._what} take {self.held} bytes together, the limit is {self._most} (setting "
                "--max-bodies-mib); try again later",
                code="bodies_too_large_together",
                status=503,
            )
        self.held += count


class HeldBody:
    """A body as it arrives. held: the bytes that it has taken of the budget."""

    def __init__(self, budget: BodyBudget) -> None:
        self.data = bytearray()
        self.held = 0
        self._budget = budget

    def add(self, part: bytes) -> None:
        """Add a part. Raises BadRequestError (503) if there is no room for it."""
        more = len(self.data) + len(part) - FREE_BYTES - self.held
        if more > 0:
            self._budget.take(more)
            self.held += more
        self.data += part

    def release(self) -> None:
        """Give the room back, when nothing made of the body is left."""
        self._budget.held -= self.held
        self.held = 0


async def read_body(
    request: Request, model: type[_Model], settings: ServerSettings, *, if_empty: bytes = b""
) -> _Model:
    """Return the body as a checked model. if_empty: stands for an empty body. Raises BadRequestError."""
    data = await receive_body(request, settings) or if_empty
    if len(data) <= _INLINE_BYTES and data.count(b",") <= _INLINE_COMMAS:
        return _parse(data, model, settings)
    parsing: Threads = request.app.state.parsing
    return await parsing.run(_parse_in_turn, request.app.state.bodies, data, model, settings)


async def body_parts(request: Request, settings: ServerSettings) -> AsyncIterator[bytes]:
    """Yield the parts of a body as they arrive. Raises BadRequestError (408) if the body stalls, or is too slow.

    Only the time spent waiting counts. Slow work on the parts does not count.
    """
    loop, patience_s = asyncio.get_running_loop(), settings.body_timeout_s
    waited_s, came, more = 0.0, 0, True
    while more:
        began = loop.time()
        try:
            async with asyncio.timeout(patience_s):
                message = await request.receive()
        except TimeoutError:
            raise _too_slow(
                f"nothing more of the request's body came for {patience_s:g} s (setting --body-timeout-s)"
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part, more = message.get("body", b""), message.get("more_body", False)
        waited_s, came = waited_s + loop.time() - began, came + len(part)
        if waited_s >= patience_s:
            if came < settings.min_body_bytes_per_s * waited_s:
                raise _too_slow(
                    f"{came} bytes of the request's body came in {waited_s:.1f} s, the least is "
                    f"{settings.min_body_bytes_per_s} a second (setting --min-body-bytes-per-s)"
                )
            waited_s, came = 0.0, 0
        yield part


def _too_slow(message: str) -> BadRequestError:
    return BadRequestError(message, code="body_timeout", status=408)


async def receive_body(request: Request, settings: ServerSettings) -> bytearray:
    """Return the whole body. Raises BadRequestError."""
    body: HeldBody = request.state.body
    limit = int(settings.max_body_mib * 2**20)
    declared = request.headers.get("content-length", "")
    too_large = BadRequestError(
        f"the request body is larger than {limit} bytes (setting --max-body-mib)", code="body_too_large", status=413
    )
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    async for part in body_parts(request, settings):
        if len(body.data) + len(part) > limit:
            raise too_large
        body.add(part)
    data, body.data = body.data, bytearray()  # the room stays taken: the parsed body is as large
    return data


def _parse_in_turn(
    bodies: BodyBudget, body: bytearray | bytes, model: type[_Model], settings: ServerSettings
) -> _Model:
    """Parse a large body, one at a time. Between two of them all else has the interpreter for as long as the first held
    it."""
    time.sleep(max(0.0, bodies.parse_from - time.monotonic()))
    began = time.monotonic()
    try:
        return _parse(body, model, settings)
    finally:
        bodies.parse_from = 2 * time.monotonic() - began


def _parse(body: bytes | bytearray, model: type[_Model], settings: ServerSettings) -> _Model:
    check_values(body, settings.max_json_values)
    return checked_within(json_object(body, "request body"), model, settings)


def checked_within(raw: dict[str, Any], model: type[_Model], settings: ServerSettings) -> _Model:
    """Check the number of an object's items, then the object as `checked` does."""
    check_items(raw, settings)
    return checked(raw, model)


def check_values(body: bytes | bytearray, limit: int, what: str = "the request body") -> None:
    """Raise BadRequestError for JSON of too many values. A value stands before each comma and behind each bracket, and
    names of fields, which take longest to read, have quotation marks. Commas and brackets in texts count, too; only
    very long texts have enough of them to matter."""
    count = sum(map(body.count, (b",", b"[", b"{", b'"')))
    if count > limit and count - body.count(b'\\"') > limit:  # those in texts are escaped
        raise BadRequestError(
            f"{what} has more commas, opening brackets and quotation marks than {limit} (setting --max-json-values)",
            code="too_many_values",
        )


def check_items(raw: dict[str, Any], settings: ServerSettings) -> None:
    """Raise BadRequestError for too many items or parts. Values of a wrong type are left to later checks."""
    most, parts = settings.max_items_per_request, 0
    for field in _LISTS:
        items = raw.get(field)
        if not isinstance(items, list) or (items and isinstance(items[0], int)):
            continue
        if len(items) > most:
            raise _too_many(f"{len(items)} items in {field}", f"{most} (setting --max-items-per-request)", field)
        given = [item.get(name) for item in items if isinstance(item, dict) for name in _PARTS]
        parts += sum(len(some) for some in given if isinstance(some, list))
        if parts > settings.max_parts_per_request:
            limit = f"{settings.max_parts_per_request} (setting --max-parts-per-request)"
            raise _too_many(f"{parts} parts in the items of {field}", limit, field)


def _too_many(what: str, limit: str, field: str) -> BadRequestError:
    return BadRequestError(f"the request has {what}, the limit is {limit}", param=field, code="too_many_parts")
