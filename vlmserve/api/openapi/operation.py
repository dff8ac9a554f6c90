"""Operations of the API, each declared at its endpoint. `document` makes the OpenAPI document of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from fastapi import FastAPI

from vlmserve.api.errors import Error

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])

# Statuses of errors: about a body, an id, the engine, and an answer that the model makes.
BODY_ERRORS = (400, 408, 413)
ID_ERRORS = (404,)
ENGINE_ERRORS = (500, 503)
MODEL_ERRORS = (*BODY_ERRORS, *ID_ERRORS, 409, 429, 499, *ENGINE_ERRORS, 504)


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One operation of the API.

    id: the name of its method in generated clients. answer: the type of its JSON with the status 200, or the media type
    of other content. request, example: the type of its JSON body and an example, which gets the model's name. form: the
    schema of a multipart body. events: the type of the JSON in the events of `stream: true`. ends_with_done: the last
    event is [DONE]. query: the schemas of query parameters. errors: the statuses of its own errors. conflict: the type
    of its 409.
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
