"""API keys: `Authorization: Bearer KEY`."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from vlmserve.server.errors import JsonResponse, error_body

# Load balancers and Prometheus have no key; neither path tells anything about requests' content.
OPEN_PATHS = frozenset(("/health", "/metrics", "/version"))


class ApiKeyMiddleware:
    """Answers 401 unless one of `keys` comes with the request, compared in constant time. No keys: all may enter."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = tuple(key.encode() for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._keys or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        key = self._known_key(scope)
        if key is not None:
            scope.setdefault("state", {})["owner"] = hashlib.sha256(b"vlmserve owner of files: " + key).hexdigest()
            await self._app(scope, receive, send)
            return
        body = error_body(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
        await JsonResponse(body, 401, headers={"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _known_key(self, scope: Scope) -> bytes | None:
        """The key that came with the request, if it is one of ours."""
        given = next((value for name, value in scope["headers"] if name.lower() == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        # Every key is compared, so that the time taken does not tell which one it was.
        found = sum(hmac.compare_digest(key.strip(), known) for known in self._keys) > 0
        return key.strip() if found else None


def owner_of(request: Request) -> str:
    """Whose files a request sees: a digest of its API key; without API keys all are the same."""
    return getattr(request.state, "owner", "")


def client_of(request: Request) -> str:
    """With whom a request takes turns: its API key, and the address that it comes from."""
    return f"{owner_of(request)} {request.client.host if request.client else ''}"
