"""Protection against web pages, for a server without API keys.

A browser on the server's machine or in its network sends whatever a page tells it to. A page can point its own name at
the server; then the Host is that name. Or it can send a request whose answer it cannot read; then there is an Origin. A
page can forge neither. An address as the Host is safe, since no DNS led to it.
"""

from __future__ import annotations

import ipaddress

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from vlmserve.api.errors import error_body

_OURS = (".localhost",)
# Content types that a page may send without asking (the Fetch standard's safelist), and the path that takes no JSON
_SIMPLE = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data")
_UPLOADS = "/v1/files"
# Probes of load balancers ask by any name.
OPEN_PATH = "/health"
# The API's description, and the files of Swagger UI that show it
DOCUMENT_PATH = "/openapi.json"
PAGE_PATH = "/docs"
SCRIPT_PATH = "/docs/swagger-ui-bundle.js"
STYLE_PATH = "/docs/swagger-ui.css"
DESCRIPTION_PATHS = frozenset((DOCUMENT_PATH, PAGE_PATH, SCRIPT_PATH, STYLE_PATH))


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
        if scope["type"] == "http" and scope["path"] != OPEN_PATH:
            headers = {name.lower(): value.decode("latin-1") for name, value in scope["headers"]}
            refusal = self._refusal(headers, scope["method"], scope["path"])
            if refusal is not None:
                status, message, code = refusal
                await JSONResponse(error_body(status, message, code=code), status)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, headers: dict[bytes, str], method: str, path: str) -> tuple[int, str, str] | None:
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
        if method == "POST" and kind in _SIMPLE and path != _UPLOADS:
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


def _name_of(host: str) -> str:
    """Return a Host header without its port, its last dot, and the brackets of IPv6."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.rpartition(":")[0 if ":" in host else 2].lower().removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
