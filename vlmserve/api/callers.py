"""The caller of a request, as `ApiKeyMiddleware` found out."""

from __future__ import annotations

from starlette.requests import HTTPConnection

from vlmserve.frontend.requests import Caller


def owner_of(request: HTTPConnection) -> str:
    """Return the owner of the files that a request sees: a digest of its key's name, or of --api-key. Without API keys
    all requests have the same owner."""
    return getattr(request.state, "owner", "")


def caller_of(request: HTTPConnection) -> Caller:
    """Return the caller of an HTTP request, or of a WebSocket."""
    state, owner = request.state, owner_of(request)
    name = getattr(state, "client_name", "")
    return Caller(
        client=f"name {name}" if name else f"{owner} {request.client.host if request.client else ''}",
        owner=owner,
        tenant=getattr(state, "tenant", ""),
        ended=None if (answers := getattr(state, "answers", None)) is None else answers.add,
    )
