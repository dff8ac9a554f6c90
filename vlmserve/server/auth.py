"""API keys: `Authorization: Bearer KEY`."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

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
        if scope["type"] != "http" or not self._keys or scope["path"] in OPEN_PATHS or self._is_known(scope):
            await self._app(scope, receive, send)
            return
        body = error_body(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
        await JsonResponse(body, 401, headers={"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name.lower() == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        # Every key is compared, so that the time taken does not tell which one it was.
        return sum(hmac.compare_digest(key.strip(), known) for known in self._keys) > 0
