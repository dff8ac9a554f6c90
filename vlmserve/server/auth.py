"""API keys: `Authorization: Bearer KEY`."""

from __future__ import annotations

import hashlib
import hmac

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from vlmserve.server.errors import error_body

# Load balancers and Prometheus have no key; neither path tells anything about requests' content.
OPEN_PATHS = frozenset(("/health", "/metrics", "/version"))


class ApiKeyMiddleware:
    """Answers 401 unless `key` comes with the request, compared in constant time."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()
        self._owner = hashlib.sha256(b"vlmserve owner of files: " + self._key).hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name.lower() == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        if scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key):
            scope.setdefault("state", {})["owner"] = self._owner
            await self._app(scope, receive, send)
            return
        body = error_body(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
        await JSONResponse(body, 401, headers={"WWW-Authenticate": "Bearer"})(scope, receive, send)


def owner_of(request: Request) -> str:
    """Whose files a request sees: a digest of its API key; without API keys all are the same."""
    return getattr(request.state, "owner", "")


def client_of(request: Request) -> str:
    """With whom a request takes turns: its API key, and the address that it comes from."""
    return f"{owner_of(request)} {request.client.host if request.client else ''}"
