"""API keys: `Authorization: Bearer KEY`."""

from __future__ import annotations

import hashlib
import hmac

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from vlmserve.server.errors import error_body
from vlmserve.server.openapi.paths import DESCRIPTION_PATHS

# What operators do to the engine; with a key of their own, if there is one.
CONTROL_PATHS = frozenset(
    (
        "/flush_cache",
        "/server_info",
        "/pause_generation",
        "/continue_generation",
        "/start_profile",
        "/stop_profile",
        "/abort_request",
    )
)
# Load balancers and Prometheus have no key, nor has who reads the API's description; neither path tells anything about
# requests' content.
OPEN_PATHS = frozenset(("/health", "/metrics", "/version", *DESCRIPTION_PATHS))


class ApiKeyMiddleware:
    """Answers 401 unless the key comes with the request, compared in constant time.

    key: of all paths but the open ones; None: they need none. admin_key: of `CONTROL_PATHS`, in place of the other;
    None: they need the other.
    """

    def __init__(self, app: ASGIApp, key: str | None, admin_key: str | None) -> None:
        self._app = app
        self._key = None if key is None else key.encode()
        self._admin_key = self._key if admin_key is None else admin_key.encode()
        self._owner = hashlib.sha256(b"vlmserve owner of files: " + (self._key or b"")).hexdigest() if key else ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        control = scope["path"] in CONTROL_PATHS
        needed = self._admin_key if control else self._key
        if needed is None:
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name.lower() == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        if scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), needed):
            scope.setdefault("state", {})["owner"] = self._owner
            await self._app(scope, receive, send)
            return
        if control and self._admin_key != self._key:
            message = "a valid admin API key is needed: Authorization: Bearer KEY (setting --admin-api-key)"
        else:
            message = "a valid API key is needed: Authorization: Bearer KEY"
        body = error_body(401, message, code="invalid_api_key")
        await JSONResponse(body, 401, headers={"WWW-Authenticate": "Bearer"})(scope, receive, send)


def owner_of(request: Request) -> str:
    """Whose files a request sees: a digest of its API key; without API keys all are the same."""
    return getattr(request.state, "owner", "")


def client_of(request: Request) -> str:
    """With whom a request takes turns: its API key, and the address that it comes from."""
    return f"{owner_of(request)} {request.client.host if request.client else ''}"
