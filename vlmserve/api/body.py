"""The body of a request as it arrives, and as a checked JSON object."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel

from vlmserve.api.body_budget import HeldBody, check_items, check_values
from vlmserve.config.settings import ServerSettings
from vlmserve.frontend.openai.json_bodies import checked, json_object
from vlmserve_common.errors import BadRequestError

_Model = TypeVar("_Model", bound=BaseModel)
# Bodies beyond either are parsed in a thread. Many small values take time, and a comma stands between two of them; a
# picture is one long text, which takes microseconds, less than a thread's start.
_INLINE_BYTES = 256 * 1024
_INLINE_COMMAS = 2000


async def read_body(
    request: Request, model: type[_Model], settings: ServerSettings, *, if_empty: bytes = b""
) -> _Model:
    """Return the body as a checked model. if_empty: stands for an empty body. Raises BadRequestError."""
    data = await _receive(request, settings) or if_empty
    if len(data) <= _INLINE_BYTES and data.count(b",") <= _INLINE_COMMAS:
        return _parse(data, model, settings)
    async with request.app.state.parsing:
        return await asyncio.to_thread(_parse, data, model, settings)


async def body_parts(request: Request, settings: ServerSettings) -> AsyncIterator[bytes]:
    """Yield the parts of a body as they arrive. Raises BadRequestError (408) if the body stalls, or is too slow.

    Only the time spent waiting counts. Slow work on the parts does not count.
    """
    stream, loop = request.stream(), asyncio.get_running_loop()
    patience_s = settings.body_timeout_s
    waited_s, came = 0.0, 0
    while True:
        began = loop.time()
        try:
            async with asyncio.timeout(patience_s):
                part = await anext(stream, None)
        except TimeoutError:
            raise _too_slow(
                f"nothing more of the request's body came for {patience_s:g} s (setting --body-timeout-s)"
            ) from None
        if part is None:
            return
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


async def _receive(request: Request, settings: ServerSettings) -> bytearray:
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


def _parse(body: bytes | bytearray, model: type[_Model], settings: ServerSettings) -> _Model:
    check_values(body, settings.max_json_values)
    return checked_within(json_object(body, "request body"), model, settings)


def checked_within(raw: dict[str, Any], model: type[_Model], settings: ServerSettings) -> _Model:
    """Check the number of an object's items, then the object as `checked` does."""
    check_items(raw, settings)
    return checked(raw, model)
