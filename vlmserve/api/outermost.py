"""The outermost layer of every HTTP request: its id, its figure in the metrics, its line in the log, and its trace."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vlmserve.api.body import BodyBudget, HeldBody
from vlmserve.api.errors import CLIENT_CLOSED_REQUEST, error_response
from vlmserve.api.request_id import HEADER, given_id, new_id
from vlmserve.api.tracing import TRACED_ROUTES, EndedAnswers
from vlmserve_common.logs import request_id

if TYPE_CHECKING:
    from vlmserve.api.tracing import RequestTracer
    from vlmserve.frontend.request_stats import RequestStats

access = logging.getLogger("vlmserve.access")
# why a request was turned away, where its error has no code
_REASONS = {401: "invalid_api_key", 404: "not_found", 405: "not_found", 408: "timeout", 413: "too_large", 429: "busy"}


class HttpMetrics(Protocol):
    """Counts HTTP requests by path and status, and those that were turned away by the code of the error."""

    def observe_http(self, path: str, status: int) -> None: ...
    def observe_refusal(self, reason: str) -> None: ...


class OutermostMiddleware:
    """Counts requests by route and status, names every answer, and answers unexpected errors with OpenAI's 500.

    bodies: each request's body takes room of them until the request has ended, since its texts and media are parts of
    the body. access_log: log a line for each ended request: client, method, path, status, duration, request id.
    tracer: gets each ended chat request.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: HttpMetrics,
        *,
        bodies: BodyBudget,
        access_log: bool,
        tracer: RequestTracer | None = None,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._bodies = bodies
        self._access_log = access_log
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, began_ns = time.monotonic(), time.time_ns()
        status: int | None = None
        given = given_id(scope["headers"])
        state: dict[str, Any] = scope.setdefault("state", {})
        state |= {"given_request_id": given, "request_id": given or new_id("req"), "answers": EndedAnswers()}
        state["body"] = body = HeldBody(self._bodies)
        token = request_id.set(state["request_id"])

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = state["request_id"]
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception as error:
            if status is not None:
                raise
            await error_response(error)(scope, receive, watched_send)
        finally:
            body.release()
            request_id.reset(token)
            known = CLIENT_CLOSED_REQUEST if status is None else status
            route = getattr(scope.get("route"), "path", "other")
            self._count(route, known, state)
            if self._access_log:
                _log(scope, known, time.monotonic() - started, state["request_id"])
            if self._tracer is not None and route in TRACED_ROUTES:
                self._tracer.record(route, known, scope["headers"], began_ns, state)

    def _count(self, route: str, status: int, state: dict[str, Any]) -> None:
        self._metrics.observe_http(route, status)
        if (400 <= status < 500 and status != CLIENT_CLOSED_REQUEST) or status == 503:
            reason = state.get("error_code") or _REASONS.get(status)
            self._metrics.observe_refusal(reason or ("unavailable" if status == 503 else "invalid_request"))


def _log(scope: Scope, status: int, seconds: float, name: str) -> None:
    """Log a request. The path stays percent-encoded, so that it cannot break the line. The query, which may be secret,
    is left out."""
    host, port = scope.get("client") or ("-", 0)
    raw = scope.get("raw_path") or quote(scope["path"]).encode()
    path = quote(raw.decode("latin-1"), safe="/%:@!$&'()*+,;=-._~")
    access.info("%s:%d %s %s %d %.3f s %s", host, port, scope["method"], path, status, seconds, name)


requests = logging.getLogger("vlmserve.requests")
_STAGES = ("fetch", "preprocess", "encode", "queue", "prefill", "decode")


def log_request(stats: RequestStats) -> None:
    """Log a line for an answer that has ended (`--log-requests`): its length and the time of each stage."""
    timings, media = stats.timings, stats.media
    counts = [f"{stats.prompt_tokens} prompt tokens ({stats.cached_tokens} cached)"] if stats.prompt_tokens else []
    counts += [f"{count} {word}" for count, word in ((media.images, "pictures"), (media.videos, "videos")) if count]
    counts.append(f"{stats.completion_tokens} tokens")
    if timings.retractions:
        counts.append(f"retracted {timings.retractions} times")
    stages = []
    for name in _STAGES:
        seconds = getattr(timings, f"{name}_s")
        if seconds is not None:
            found = " (cached)" if name == "encode" and timings.encode_cached else ""
            stages.append(f"{name} {seconds:.3f}{found}")
    stages.append(f"total {timings.total_s:.3f} s")
    status = "" if stats.status is None else f" {stats.status}"
    requests.info("%s %s%s: %s; %s", stats.rid, stats.finish, status, ", ".join(counts), ", ".join(stages))
