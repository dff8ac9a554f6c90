"""A request's body as it comes; a JSON body within its limits, and of its shape."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import pydantic_core
from fastapi import Request
from pydantic import BaseModel, ValidationError

from vlmserve.config.settings import ServerSettings
from vlmserve.server.errors import refuse_invalid
from vlmserve.server.protocol import FIELDS_INSIDE
from vlmserve_common.errors import BadRequestError

_Model = TypeVar("_Model", bound=BaseModel)
# Bodies beyond either are parsed in a thread. Many small values take time, and a comma stands between two of them; a
# picture is one long text, which takes microseconds, less than a thread's start.
_INLINE_BYTES = 256 * 1024
_INLINE_COMMAS = 2000


async def read_body(request: Request, model: type[_Model], settings: ServerSettings) -> _Model:
    """The body, checked. Raises BadRequestError."""
    body = await read_whole(request, settings)
    if len(body) <= _INLINE_BYTES and body.count(b",") <= _INLINE_COMMAS:
        return _parse(body, model)
    return await asyncio.to_thread(_parse, body, model)


async def body_parts(request: Request, stall_s: float) -> AsyncIterator[bytes]:
    """A body as it comes. Raises BadRequestError (408) when it stalls."""
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(stall_s):
                part = await anext(stream, None)
        except TimeoutError:
            raise BadRequestError(
                f"nothing more of the request's body came for {stall_s:g} s (setting --body-timeout-s)",
                code="body_timeout",
                status=408,
            ) from None
        if part is None:
            return
        yield part


async def read_whole(request: Request, settings: ServerSettings) -> bytes:
    """The body as it came, within its limits. Raises BadRequestError."""
    limit = int(settings.max_body_mib * 2**20)
    declared = request.headers.get("content-length", "")
    size = int(declared) if declared.isdecimal() else 0
    parts: list[bytes] = []
    if size <= limit:
        size = 0
        async for part in body_parts(request, settings.body_timeout_s):
            size += len(part)
            if size > limit:
                break
            parts.append(part)
    if size > limit:
        raise BadRequestError(
            f"the request body is larger than {limit} bytes (setting --max-body-mib)",
            code="body_too_large",
            status=413,
        )
    return b"".join(parts)


def _parse(body: bytes, model: type[_Model]) -> _Model:
    return checked(json_object(body, "request body"), model)


def json_object(text: bytes, what: str) -> dict[str, Any]:
    """The object that some JSON is. what: its name in errors. Raises BadRequestError."""
    if not text.strip():
        raise BadRequestError(f"the {what} is empty; it must be a JSON object", code="invalid_json")
    try:
        raw = pydantic_core.from_json(text, allow_inf_nan=False)
    except ValueError as error:
        why = str(error).replace("EOF while parsing", "it ends within")
        raise BadRequestError(f"the {what} is not valid JSON: {why}", code="invalid_json") from None
    if not isinstance(raw, dict):
        raise BadRequestError(f"the {what} must be a JSON object", code="invalid_json")
    return raw


def checked(raw: dict[str, Any], model: type[_Model]) -> _Model:
    """An object as the model that it is to be. Raises BadRequestError."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        inside = len(error.errors(include_url=False, include_input=False)[0]["loc"]) > 1
        raise refuse_invalid(error, raw, FIELDS_INSIDE if inside else model.model_fields) from None
