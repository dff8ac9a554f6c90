"""API keys (`Authorization: Bearer KEY`), and the callers that they stand for."""

from __future__ import annotations

import hashlib
import hmac

from fastapi import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from vlmserve.api.api_keys import ApiKeys
from vlmserve.api.errors import error_body
from vlmserve.api.web_pages import DESCRIPTION_PATHS
from vlmserve.frontend.requests import Caller

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
# What operators read: with the operators' key, if there is one, and without any otherwise.
METRICS_PATH = "/metrics"
# Load balancers and readers of the API's description have no key. These paths tell nothing about requests.
OPEN_PATHS = frozenset(("/health", "/version", *DESCRIPTION_PATHS))


class ApiKeyMiddleware:
    """Answers 401 unless a valid key comes with the request. Keys are compared in constant time.

    keys: the keys of all paths except the open ones; None: these paths need no key. admin_key: the key of
    `CONTROL_PATHS` and of /metrics; None: control paths take one of the other keys, and /metrics needs no key. scoped:
    caches are not shared between names.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys | None, admin_key: str | None, *, scoped: bool) -> None:
        self._app = app
        self._keys = keys
        self._admin_digest = None if admin_key is None else hashlib.sha256(admin_key.encode()).digest()
        self._scoped = scoped

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path")
        if scope["type"] != "http" or path in OPEN_PATHS or (path == METRICS_PATH and self._admin_digest is None):
            await self._app(scope, receive, send)
            return
        admin = self._admin_digest is not None and (path in CONTROL_PATHS or path == METRICS_PATH)
        if (self._is_admin if admin else self._is_client)(scope):
            await self._app(scope, receive, send)
            return
        message = "a valid API key is needed: Authorization: Bearer KEY"
        if admin:
            message = "a valid admin API key is needed: Authorization: Bearer KEY (setting --admin-api-key)"
        body = error_body(401, message, code="invalid_api_key")
        await JSONResponse(body, 401, headers={"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _is_admin(self, scope: Scope) -> bool:
        assert self._admin_digest is not None
        return hmac.compare_digest(hashlib.sha256(_given_key(scope)).digest(), self._admin_digest)

    def _is_client(self, scope: Scope) -> bool:
        if self._keys is None:
            return True
        holder = self._keys.holder(_given_key(scope))
        if holder is None:
            return False
        tenant = holder.name if self._scoped else ""
        scope.setdefault("state", {}).update(owner=holder.owner, client_name=holder.name, tenant=tenant)
        return True


def _given_key(scope: Scope) -> bytes:
    given: bytes = next((value for name, value in scope["headers"] if name.lower() == b"authorization"), b"")
    scheme, _, key = given.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""


def owner_of(request: Request) -> str:
    """Return the owner of the files that a request sees: a digest of its key's name, or of --api-key. Without API keys
    all requests have the same owner."""
    return getattr(request.state, "owner", "")


def caller_of(request: Request) -> Caller:
    """Return the caller of an HTTP request."""
    state, owner = request.state, owner_of(request)
    name = getattr(state, "client_name", "")
    return Caller(
        client=f"name {name}" if name else f"{owner} {request.client.host if request.client else ''}",
        owner=owner,
        tenant=getattr(state, "tenant", ""),
        ended=state.answers.add,
    )
