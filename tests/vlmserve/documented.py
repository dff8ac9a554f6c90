"""Checks that answers are what the declared operations say: all their fields, and no other."""

from __future__ import annotations

import json
from typing import Any

import httpx
from pydantic import TypeAdapter

from vlmserve.api.app import all_operations
from vlmserve.api.errors import Error
from vlmserve.api.openapi import Operation

BY_ID = {operation.id: operation for operation in all_operations()}


def ask(client: httpx.Client, operation_id: str, *, place: str = "", **fields: Any) -> Any:
    """The answer to an operation: its JSON, a list of its events' JSON, or its bytes. place: what stands for the
    parameter in its path. fields: httpx's."""
    operation = BY_ID[operation_id]
    path = operation.path.partition("{")[0] + place + operation.path.partition("}")[2]
    response = client.request(operation.method, path, **fields)
    return checked(operation, response)


def checked(operation: Operation, response: httpx.Response) -> Any:
    """Its content, which is as documented."""
    media, status = response.headers["content-type"].partition(";")[0], response.status_code
    if status != 200:
        assert status in operation.errors, response.text
        assert media == "application/json"
        return _json(response.content, operation.conflict if status == 409 else Error)
    if media == "text/event-stream":
        return _events(operation, response.text)
    if isinstance(operation.answer, str):
        assert media == operation.answer
        return response.content
    assert media == "application/json"
    return _json(response.content, operation.answer)


def _events(operation: Operation, text: str) -> list[dict[str, Any]]:
    *events, rest = text.split("\n\n")
    assert rest == ""
    if operation.ends_with_done:
        assert events.pop() == "data: [DONE]"
    found = []
    for event in events:
        *name, data = event.split("\n")
        found.append(_json(data.removeprefix("data: "), operation.events))
        assert name == ([f"event: {found[-1]['type']}"] if "type" in found[-1] else [])
    return found


def _json(text: str | bytes, kind: Any) -> Any:
    TypeAdapter(kind).validate_json(text, strict=True, extra="forbid")
    return json.loads(text)
