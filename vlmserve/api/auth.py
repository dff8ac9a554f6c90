"""Who may ask: API keys (`Authorization: Bearer KEY`), and web pages where there are no keys.

A browser on the server's machine or in its network sends whatever a page tells it to. A page can point its own name at
the server; then the Host is that name. Or it can send a request whose answer it cannot read; then there is an Origin. A
page can forge neither. An address as the Host is safe, since no DNS led to it.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import ipaddress

from starlette.responses import JSONResponse
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from vlmserve.api.api_keys import ApiKeys
from vlmserve.api.errors import error_body

_OURS = (".localhost",)
# Content types that a page may send without asking (the Fetch standard's safelist), and the paths that take forms
_SIMPLE = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
_FORMS = ("/v1/files", "/v1/audio/transcriptions")
# Probes of load balancers ask by any name.
OPEN_PATH = "/health"
# The page with a chat. It tells no more than the API's description does.
FRONT_PATH = "/"
# The API's description, and the files of Swagger UI that show it
DOCUMENT_PATH = "/openapi.json"
PAGE_PATH = "/docs"
SCRIPT_PATH = "/docs/swagger-ui-bundle.js"
STYLE_PATH = "/docs/swagger-ui.css"
DESCRIPTION_PATHS = frozenset((FRONT_PATH, DOCUMENT_PATH, PAGE_PATH, SCRIPT_PATH, STYLE_PATH))


class WebPageGuard:
    """Answers 403 to requests for another host or of foreign pages, and 415 to JSON under a type that pages may send.

    hosts: names allowed besides localhost, with a dot in front for all names below; ("*",): any name. origins: pages
    that are allowed; ("*",): all. bound: the address that the server listens on.
    """

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...], origins: tuple[str, ...], *, bound: str) -> None:
        self._app = app
        self._hosts = (*hosts, "localhost", bound.lower(), *_OURS)
        self._any_host = "*" in hosts
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and scope["path"] != OPEN_PATH:
            headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
            refusal = self._refusal(headers, scope)
            if refusal is not None:
                status, message, code = refusal
                await JSONResponse(error_body(status, message, code=code), status)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, headers: dict[bytes, str], scope: Scope) -> tuple[int, str, str] | None:
        host, origin = headers.get(b"host", ""), headers.get(b"origin", "")
        if not self._knows(host):
            message = (
                f"a server without API keys answers to localhost and addresses only, not to {host[:80]!r} (settings "
                "--allowed-hosts, --api-key)"
            )
            return 403, message, "host_not_allowed"
        if origin and not self._welcomes(origin, host):
            message = (
                f"a server without API keys is not for pages of {origin[:80]!r} (settings --allowed-origins, --api-key)"
            )
            return 403, message, "origin_not_allowed"
        kind = headers.get(b"content-type", "").partition(";")[0].strip().lower()
        if scope.get("method") == "POST" and kind in _SIMPLE and scope["path"] not in _FORMS and _is_there(scope):
            return 415, f"the request's Content-Type is {kind!r}; it must be application/json", "unsupported_media_type"
        return None

    def _knows(self, host: str) -> bool:
        name = _name_of(host)
        if self._any_host or not name or _is_address(name):
            return True
        return any(name.endswith(known) if known.startswith(".") else name == known for known in self._hosts)

    def _welcomes(self, origin: str, host: str) -> bool:
        if "*" in self._origins or origin in self._origins:
            return True
        scheme, _, place = origin.partition("://")
        default = {"http": ":80", "https": ":443"}.get(scheme, "")
        return bool(place) and place.lower().removesuffix(default) == host.lower().removesuffix(default)


def _is_there(scope: Scope) -> bool:
    """Return whether there is an endpoint at the request's path."""
    # A router knows only what is its own.
    return "app" not in scope or any(route.matches(scope)[0] is Match.FULL for route in scope["app"].routes)


def _name_of(host: str) -> str:
    """Return a Host header without its port, its last dot, and the brackets of IPv6."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.rpartition(":")[0 if ":" in host else 2].lower().removesuffix(".")


@functools.lru_cache(256)
def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


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
        *(f"{prefix}/{verb}_lora_adapter" for prefix in ("", "/v1") for verb in ("load", "unload")),
        "/update_weights_from_disk",
        "/update_weights_from_tensor",
        "/init_weights_update_group",
        "/update_weights_from_distributed",
        "/destroy_weights_update_group",
        "/get_weight_version",
        "/release_memory_occupation",
        "/resume_memory_occupation",
        "/sleep",
        "/wake_up",
        "/is_sleeping",
    )
)
# The servers behind a router, which operators change.
WORKERS_PATH = "/workers"
# What operators read: with the operators' key, if there is one, and without any otherwise.
METRICS_PATH = "/metrics"
# Load balancers and readers of the API's description have no key. These paths tell nothing about requests.
OPEN_PATHS = frozenset(("/health", "/version", *DESCRIPTION_PATHS))


class ApiKeyMiddleware:
    """Answers 401 unless a valid key comes with the request. Keys are compared in constant time.

    keys: the keys of all paths except the open ones; None: these paths need no key. admin_key: the key of
    `CONTROL_PATHS`, of a router's /workers, and of /metrics; None: control paths take one of the other keys, and
    /metrics needs no key. scoped: caches are not shared between names.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys | None, admin_key: str | None, *, scoped: bool) -> None:
        self._app = app
        self._keys = keys
        self._admin_digest = None if admin_key is None else hashlib.sha256(admin_key.encode()).digest()
        self._scoped = scoped

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope.get("path", "")
        if (
            scope["type"] not in ("http", "websocket")
            or path in OPEN_PATHS
            or (path == METRICS_PATH and self._admin_digest is None)
        ):
            await self._app(scope, receive, send)
            return
        controls = path in CONTROL_PATHS or path == METRICS_PATH or path.startswith(WORKERS_PATH)
        admin = self._admin_digest is not None and controls
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
