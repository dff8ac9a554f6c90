"""API keys (`Authorization: Bearer KEY`), and who asks."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass

from fastapi import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from vlmserve.api.api_keys import ApiKeys
from vlmserve.api.errors import error_body
from vlmserve.api.web_pages import DESCRIPTION_PATHS
from vlmserve.frontend.request_stats import RequestStats

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
# Load balancers have no key, nor has who reads the API's description; none of it tells anything about requests.
OPEN_PATHS = frozenset(("/health", "/version", *DESCRIPTION_PATHS))


class ApiKeyMiddleware:
    """Answers 401 unless a key comes with the request, compared in constant time.

    keys: of all paths but the open ones; None: they need none. admin_key: of `CONTROL_PATHS`, in place of these, and of
    /metrics; None: control needs one of the others, and /metrics none. scoped: caches are not shared between names.
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
    """Whose files a request sees: a digest of its key's name, or of --api-key; without API keys all are the same."""
    return getattr(request.state, "owner", "")


def client_of(request: Request) -> str:
    """With whom a request takes turns: its key's name, or without one its API key and the address it comes from."""
    name = getattr(request.state, "client_name", "")
    return f"name {name}" if name else f"{owner_of(request)} {request.client.host if request.client else ''}"


def tenant_of(request: Request) -> str:
    """Within whose requests a request may find cached prefixes and media; "": within those of all that have none."""
    return getattr(request.state, "tenant", "")


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """client: takes turns with others. owner: whose files, sessions and stored answers are its own. tenant: see
    `GenerateReqInput`. ended: is told what became of each choice. priority: in place of what requests leave out; lower
    goes first."""

    client: str = ""
    owner: str = ""
    tenant: str = ""
    ended: Callable[[RequestStats], None] | None = None
    priority: int = 0


def caller_of(request: Request) -> Caller:
    """Of an HTTP request."""
    return Caller(
        client=client_of(request),
        owner=owner_of(request),
        tenant=tenant_of(request),
        ended=request.state.answers.add,
    )
