"""Operations of the API, each declared at its endpoint; GET /openapi.json, made of them; and GET /docs, Swagger UI.

The page works without internet.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from importlib.resources import as_file, files
from typing import Any, Literal, TypeVar, get_args

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from pydantic import TypeAdapter
from starlette.responses import FileResponse, Response

from vlmserve.api.auth import CONTROL_PATHS, DOCUMENT_PATH, METRICS_PATH, OPEN_PATHS, PAGE_PATH, SCRIPT_PATH, STYLE_PATH
from vlmserve.api.auth import OPEN_PATH as HEALTH_PATH
from vlmserve.api.errors import Error
from vlmserve.frontend.openai.json_bodies import json_text
from vlmserve_common.version import __version__

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])

# Statuses of errors: about a body, an id, the id of something that is kept, the engine, and an answer that the model
# makes.
BODY_ERRORS = (400, 408, 413)
ID_ERRORS = (404,)
KEPT_ERRORS = (*ID_ERRORS, 503)
ENGINE_ERRORS = (500, 503)
MODEL_ERRORS = (*BODY_ERRORS, *ID_ERRORS, 409, 429, 499, *ENGINE_ERRORS, 504)
_KEY, _ADMIN_KEY = "apiKey", "adminApiKey"
# the package that brings Swagger UI
_SWAGGER_UI = "fastapi_offline"
_REASONS = {499: "The client left, or an operator ended the request"}
_TAGS = {
    "Answers": "What the model says, and how likely",
    "Responses": "OpenAI's newer form of chats",
    "Sessions": "Conversations that the server holds",
    "Tokens": "Prompts as the model reads them",
    "Models": "What is served",
    "Files": "Uploads that requests name by their ids",
    "Batches": "Files of requests",
    "Server": "For load balancers and monitoring",
    "Operators": "What operators ask of the engine",
}


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of the API.

    id: the name of its method in generated clients. answer: the type of its JSON with the status 200, or the media type
    of other content or of nothing but events. request, example: the type of its JSON body and an example, which gets
    the model's name. form: the schema of a multipart body. events: the type of the JSON in the events of `stream:
    true`. ends_with_done: the last event is [DONE]. query: the schemas of query parameters. errors: the statuses of its
    own errors. conflict: the type of its 409.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    id: str
    tag: str
    summary: str
    answer: Any
    request: Any = None
    example: dict[str, Any] | None = None
    form: dict[str, Any] | None = None
    needs_body: bool = True
    events: Any = None
    ends_with_done: bool = False
    query: dict[str, dict[str, Any]] | None = None
    errors: tuple[int, ...] = ()
    conflict: Any = Error


def operation(method: str, path: str, id: str, tag: str, *, answer: Any, **more: Any) -> Callable[[Endpoint], Endpoint]:
    """Return a decorator that declares an endpoint's `Operation`. The summary is the docstring's first sentence."""

    def declare(endpoint: Endpoint) -> Endpoint:
        summary = " ".join((endpoint.__doc__ or "").partition(".")[0].split())
        declared = Operation(method=method, path=path, id=id, tag=tag, summary=summary, answer=answer, **more)  # type: ignore[arg-type]
        endpoint.operation = declared  # type: ignore[attr-defined]
        return endpoint

    return declare


def endpoints_of(api: object) -> list[Callable[..., Any]]:
    """Return the endpoints of a class or of its object, in the order of their declarations."""
    kind = api if isinstance(api, type) else type(api)
    return [getattr(api, name) for name, value in vars(kind).items() if hasattr(value, "operation")]


def add_operations(app: FastAPI, endpoints: Iterable[Callable[..., Any]]) -> None:
    """Add the routes of endpoints."""
    for endpoint in endpoints:
        declared: Operation = endpoint.operation  # type: ignore[attr-defined]
        app.add_api_route(declared.path, endpoint, methods=[declared.method], response_model=None)


def openapi_document(operations: Sequence[Operation], *, model: str, keys: bool, admin_key: bool) -> dict[str, Any]:
    """Return the document, in OpenAPI 3.1.

    model: the model's name, for examples. keys: clients need an API key. admin_key: operators need a key of theirs.
    """
    schemas, components = _schemas(operations)
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        needed = _needed(operation, keys=keys, admin_key=admin_key)
        errors = _errors(operation, needed, keys=keys)
        described = _described(operation, schemas, needed, errors, model)
        paths.setdefault(operation.path.replace(":path}", "}"), {})[operation.method.lower()] = described
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
    if operation.path in OPEN_PATHS:
        return None
    monitors = operation.path == METRICS_PATH
    if admin_key and (monitors or operation.path in CONTROL_PATHS):
        return _ADMIN_KEY
    return _KEY if keys and not monitors else None


def _errors(operation: Operation, needed: str | None, *, keys: bool) -> set[int]:
    """Return the statuses of all errors: an operation's own, those of keys, connections and foreign web pages."""
    found = {*operation.errors, 503}
    if needed is not None:
        found.add(401)
    if not keys and operation.path != HEALTH_PATH:
        found.add(403)
        if operation.method == "POST" and operation.form is None:
            found.add(415)
    return found


def _schemas(operations: Sequence[Operation]) -> tuple[dict[tuple[str, str], dict[str, Any]], dict[str, Any]]:
    """Return the schemas of the operations' types, by operation and role, and the components that they refer to."""
    types: list[tuple[tuple[str, str], Any]] = [
        ((operation.id, role), kind)
        for operation in operations
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
    """Return the Operation Object. needed: the security scheme of its key. errors: statuses."""
    described: dict[str, Any] = {
        "operationId": operation.id,
        "tags": [operation.tag],
        "summary": operation.summary,
        "security": [] if needed is None else [{needed: []}],
    }
    in_path = [(name, "path", {"type": "string"}) for name in re.findall(r"\{(\w+)[:}]", operation.path)]
    in_query = [(name, "query", schema) for name, schema in (operation.query or {}).items()]
    if in_path or in_query:
        described["parameters"] = [
            {"name": name, "in": place, "schema": schema} | ({"required": True} if place == "path" else {})
            for name, place, schema in (*in_path, *in_query)
        ]
    if operation.form is not None:
        described["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": operation.form}}}
    elif operation.request is not None:
        kinds = get_args(operation.request) or (operation.request,)
        named = {"model": model} if all("model" in kind.model_fields for kind in kinds) else {}
        body = {"schema": schemas[operation.id, "request"], "example": named | (operation.example or {})}
        described["requestBody"] = {"required": operation.needs_body, "content": {"application/json": body}}
    responses = {"200": {"description": operation.summary, "content": _content(operation, schemas)}}
    for status in sorted(errors):
        schema = schemas[operation.id, "conflict"] if status == 409 else schemas["", "error"]
        reason = _REASONS.get(status) or HTTPStatus(status).phrase
        responses[str(status)] = {"description": reason, "content": {"application/json": {"schema": schema}}}
    return described | {"responses": responses}


def _content(operation: Operation, schemas: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    if isinstance(operation.answer, str) and operation.events is None:
        return {operation.answer: {"schema": {"type": "string"} if operation.answer.startswith("text/") else {}}}
    content: dict[str, Any] = {}
    if not isinstance(operation.answer, str):
        content["application/json"] = {"schema": schemas[operation.id, "answer"]}
    if operation.events is not None:
        # The schema describes one event, as in OpenAPI 3.2.
        schema = schemas[operation.id, "event"]
        data: dict[str, Any] = {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}
        if operation.ends_with_done:
            data = {"anyOf": [data, {"const": "[DONE]", "description": "the last event"}]}
        event = {"type": "object", "required": ["data"], "properties": {"event": {"type": "string"}, "data": data}}
        content["text/event-stream"] = {"schema": event}
    return content


def add_pages(app: FastAPI, *, model: str, keys: bool, admin_key: bool) -> None:
    """Add the document of an application's routes, made when it is first asked for, and the page that shows it."""
    endpoints: list[Any] = [getattr(route, "endpoint", None) for route in app.routes]
    declared = [endpoint.operation for endpoint in endpoints if hasattr(endpoint, "operation")]

    @functools.cache
    def document() -> bytes:
        return json_text(openapi_document(declared, model=model, keys=keys, admin_key=admin_key))

    def show_document() -> Response:
        return Response(document(), media_type="application/json")

    def show_page() -> Response:
        # Relative, since a proxy may have the server under a prefix. The icon is an empty one.
        return get_swagger_ui_html(
            openapi_url=DOCUMENT_PATH.removeprefix("/"),
            title="vlmserve",
            swagger_js_url=SCRIPT_PATH.removeprefix("/"),
            swagger_css_url=STYLE_PATH.removeprefix("/"),
            swagger_favicon_url="data:,",
            swagger_ui_parameters={"validatorUrl": None},  # no other server checks the document
        )

    app.add_api_route(DOCUMENT_PATH, show_document, methods=["GET"], include_in_schema=False)
    app.add_api_route(PAGE_PATH, show_page, methods=["GET"], include_in_schema=False)
    for path in (SCRIPT_PATH, STYLE_PATH):
        app.add_api_route(path, functools.partial(_file, path), methods=["GET"], include_in_schema=False)


def _file(path: str) -> Response:
    with as_file(files(_SWAGGER_UI) / "static" / path.rpartition("/")[2]) as file:
        return FileResponse(file)
