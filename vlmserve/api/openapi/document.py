"""The OpenAPI document: the table of operations, and the schemas of what it names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from pydantic import TypeAdapter

from vlmserve.api.openapi.answers.operators import Error
from vlmserve.api.openapi.operations import OPERATIONS, Operation
from vlmserve.api.web_pages import OPEN_PATH as HEALTH_PATH
from vlmserve_common.version import __version__

_KEY, _ADMIN_KEY = "apiKey", "adminApiKey"
_REASONS = {499: "The client left, or an operator ended the request"}
_TAGS = {
    "Answers": "What the model says, and how likely",
    "Responses": "OpenAI's newer form of chats",
    "Tokens": "Prompts as the model reads them",
    "Models": "What is served",
    "Files": "Uploads that requests name by their ids",
    "Batches": "Files of requests",
    "Server": "For load balancers and monitoring",
    "Operators": "What operators ask of the engine",
}


def openapi_document(*, model: str, keys: bool, admin_key: bool) -> dict[str, Any]:
    """The document, of OpenAPI 3.1. model: its name, for examples. keys: whether clients need one; admin_key: whether
    operators need one of theirs."""
    schemas, components = _schemas()
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        needed = _needed(operation, keys=keys, admin_key=admin_key)
        errors = _errors(operation, needed, keys=keys)
        described = _described(operation, schemas, needed, errors, model)
        paths.setdefault(operation.path, {})[operation.method.lower()] = described
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "vlmserve",
            "version": __version__,
            "description": "OpenAI-compatible API of a Qwen-VL model",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "tags": [{"name": name, "description": description} for name, description in _TAGS.items()],
        "paths": paths,
        "components": {"schemas": components},
    }
    schemes = {}
    if keys:
        schemes[_KEY] = {"type": "http", "scheme": "bearer", "description": "a client's key (--api-key)"}
        document["security"] = [{_KEY: []}]
    if admin_key:
        schemes[_ADMIN_KEY] = {"type": "http", "scheme": "bearer", "description": "operators' key (--admin-api-key)"}
    if schemes:
        document["components"]["securitySchemes"] = schemes
    return document


def _needed(operation: Operation, *, keys: bool, admin_key: bool) -> str | None:
    """The key that it needs."""
    if operation.access == "open":
        return None
    if operation.access != "key" and admin_key:
        return _ADMIN_KEY
    return _KEY if keys and operation.access != "monitor" else None


def _errors(operation: Operation, needed: str | None, *, keys: bool) -> set[int]:
    """Its own, and those of all: of keys, of too many connections, and of web pages where there are no keys."""
    found = {*operation.errors, 503}
    if needed is not None:
        found.add(401)
    if not keys and operation.path != HEALTH_PATH:
        found.add(403)
        if operation.method == "POST" and operation.form is None:
            found.add(415)
    return found


def _schemas() -> tuple[dict[tuple[str, str], dict[str, Any]], dict[str, Any]]:
    """Of the types in the table, by operation and role; and the components that they refer to."""
    types: list[tuple[tuple[str, str], Any]] = [
        ((operation.id, role), kind)
        for operation in OPERATIONS
        for role, kind in (
            ("request", operation.request),
            ("answer", operation.answer),
            ("event", operation.events),
            ("conflict", operation.conflict),
        )
        if kind is not None and not isinstance(kind, str)
    ]
    inputs = [(key, "validation", TypeAdapter(kind)) for key, kind in [*types, (("", "error"), Error)]]
    found, rest = TypeAdapter.json_schemas(inputs, ref_template="#/components/schemas/{model}")  # type: ignore[arg-type]
    return {key: schema for (key, _), schema in found.items()}, rest["$defs"]


def _described(
    operation: Operation,
    schemas: dict[tuple[str, str], dict[str, Any]],
    needed: str | None,
    errors: set[int],
    model: str,
) -> dict[str, Any]:
    """The Operation Object. needed: the security scheme of its key. errors: statuses."""
    described: dict[str, Any] = {
        "operationId": operation.id,
        "tags": [operation.tag],
        "summary": operation.summary,
        "security": [] if needed is None else [{needed: []}],
    }
    if parameters := [*_in_path(operation.path), *_in_query(operation)]:
        described["parameters"] = parameters
    if operation.form is not None:
        described["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": operation.form}}}
    elif operation.request is not None:
        named = {"model": model} if "model" in operation.request.model_fields else {}
        body = {"schema": schemas[operation.id, "request"], "example": named | (operation.example or {})}
        described["requestBody"] = {"required": operation.needs_body, "content": {"application/json": body}}
    responses = {"200": {"description": operation.summary, "content": _content(operation, schemas)}}
    for status in sorted(errors):
        schema = schemas[operation.id, "conflict"] if status == 409 else schemas["", "error"]
        reason = _REASONS.get(status) or HTTPStatus(status).phrase
        responses[str(status)] = {"description": reason, "content": {"application/json": {"schema": schema}}}
    return described | {"responses": responses}


def _content(operation: Operation, schemas: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    if isinstance(operation.answer, str):
        return {operation.answer: {"schema": {"type": "string"} if operation.answer.startswith("text/") else {}}}
    content: dict[str, Any] = {"application/json": {"schema": schemas[operation.id, "answer"]}}
    if operation.events is not None:
        # As OpenAPI 3.2 has it: the schema is of one event.
        schema = schemas[operation.id, "event"]
        data: dict[str, Any] = {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}
        if operation.ends_with_done:
            data = {"anyOf": [data, {"const": "[DONE]", "description": "the last event"}]}
        event = {"type": "object", "required": ["data"], "properties": {"event": {"type": "string"}, "data": data}}
        content["text/event-stream"] = {"schema": event}
    return content


def _in_path(path: str) -> Sequence[dict[str, Any]]:
    names = re.findall(r"\{(\w+)\}", path)
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def _in_query(operation: Operation) -> Sequence[dict[str, Any]]:
    return [{"name": name, "in": "query", "schema": schema} for name, schema in (operation.query or {}).items()]
