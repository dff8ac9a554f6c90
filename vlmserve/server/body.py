"""A request's JSON body: within its limit, and of its shape."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import pydantic_core
from fastapi import Request
from pydantic import BaseModel, ValidationError

from vlmserve.common.errors import BadRequestError
from vlmserve.server.errors import refuse_invalid

_Model = TypeVar("_Model", bound=BaseModel)
# Larger bodies (they hold pictures) are parsed in a thread.
_PARSE_INLINE_BYTES = 64 * 1024


async def read_body(request: Request, model: type[_Model], *, max_bytes: int) -> _Model:
    """The body, checked. Raises BadRequestError."""
    body = await _read(request, max_bytes)
    if len(body) <= _PARSE_INLINE_BYTES:
        return _parse(body, model)
    return await asyncio.to_thread(_parse, body, model)


async def _read(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "")
    size = int(declared) if declared.isdecimal() else 0
    parts: list[bytes] = []
    if size <= limit:
        size = 0
        async for part in request.stream():
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
    try:
        raw = pydantic_core.from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise BadRequestError(f"the {what} is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(raw, dict):
        raise BadRequestError(f"the {what} must be a JSON object", code="invalid_json")
    return raw


def checked(raw: dict[str, Any], model: type[_Model]) -> _Model:
    """An object as the model that it is to be. Raises BadRequestError."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise refuse_invalid(error, raw) from None
