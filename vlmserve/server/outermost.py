"""What happens to every HTTP request, whatever becomes of it: an id, a figure in the metrics, a line in the log."""

from __future__ import annotations

import logging
import time
import uuid
from urllib.parse import quote

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vlmserve.server.errors import CLIENT_CLOSED_REQUEST, error_response
from vlmserve.server.metrics import ServerMetrics

access = logging.getLogger("vlmserve.access")
REQUEST_ID = "X-Request-Id"


class OutermostMiddleware:
    """Counts requests by route and status, gives every answer a request id that has none, and answers what nobody else
    caught with OpenAI's 500.

    access_log: log a line for each request when it has ended: client, method, path, status, duration, request id.
    """

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, *, access_log: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        status: int | None = None
        request_id = f"req-{uuid.uuid4().hex}"

        async def watched_send(message: Message) -> None:
            nonlocal status, request_id
            if message["type"] == "http.response.start":
                status = message["status"]
                request_id = MutableHeaders(scope=message).setdefault(REQUEST_ID, request_id)
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception as error:
            if status is not None:
                raise
            await error_response(error)(scope, receive, watched_send)
        finally:
            known = CLIENT_CLOSED_REQUEST if status is None else status
            self._metrics.observe_http(getattr(scope.get("route"), "path", "other"), known)
            if self._access_log:
                _log(scope, known, time.monotonic() - started, request_id)


def _log(scope: Scope, status: int, seconds: float, request_id: str) -> None:
    """Paths as they came, in percent-encoding, so that none can break a line; without the query, which may tell
    secrets."""
    host, port = scope.get("client") or ("-", 0)
    raw = scope.get("raw_path") or quote(scope["path"]).encode()
    path = quote(raw.decode("latin-1"), safe="/%:@!$&'()*+,;=-._~")
    access.info("%s:%d %s %s %d %.3f s %s", host, port, scope["method"], path, status, seconds, request_id)
