"""A router as an ASGI application: its own endpoints, the lists of all servers, and everything else forwarded."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

from starlette.datastructures import QueryParams
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from vlmserve.api.api_keys import read_api_keys
from vlmserve.api.auth import CONTROL_PATHS, METRICS_PATH, WORKERS_PATH, ApiKeyMiddleware, WebPageGuard
from vlmserve.api.auth import OPEN_PATH as HEALTH_PATH
from vlmserve.api.body import BodyBudget, receive_body
from vlmserve.api.errors import error_body, not_found
from vlmserve.api.outermost import HttpMetrics, OutermostMiddleware
from vlmserve.api.pages import page_of
from vlmserve.api.request_id import HEADER as REQUEST_ID_HEADER
from vlmserve.config.settings import ServerSettings
from vlmserve.frontend.openai.json_bodies import checked, json_object
from vlmserve.frontend.openai.protocol import StrictModel
from vlmserve.router.forwarding import Forwarding
from vlmserve.router.metrics import CONTENT_TYPE_LATEST, RouterMetrics, joined
from vlmserve.router.relay import Relay
from vlmserve.router.settings import Role, RouterSettings, checked_url
from vlmserve.router.upstream import Headers, ServerLostError
from vlmserve.router.workers import Worker, Workers
from vlmserve_common.errors import BadRequestError
from vlmserve_common.process.threads import Threads

_METRICS_TIMEOUT_S = 5.0
# Lists of several servers: the most items of a page, and the usual number
_PAGED = {"/v1/files": (10_000, 10_000), "/v1/batches": (100, 20)}
_MODELS = "/v1/models"
_SESSIONS = "/v1/sessions"


class NewWorker(StrictModel):
    """The body of POST /workers."""

    url: str
    role: Role = "replica"


class RouterApp:
    """Answers what is the router's own, and forwards the rest."""

    def __init__(self, workers: Workers, settings: RouterSettings, metrics: RouterMetrics, parsing: Threads) -> None:
        self._workers = workers
        self._settings = settings
        self._metrics = metrics
        self._parsing = parsing
        self._forward = Forwarding(workers, settings, metrics, parsing)
        self._relay = Relay(workers, settings, metrics, self._forward)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._relay(scope, receive, send)
            return
        path, method = scope["path"], scope["method"]
        # a body may come with any method, but these have none that matters
        try:
            if path in (HEALTH_PATH, METRICS_PATH, _MODELS, _SESSIONS, *_PAGED) and method == "GET":
                response = await self._get(scope, path)
            elif path == WORKERS_PATH or path.startswith(WORKERS_PATH + "/"):
                response = await self._change_workers(Request(scope, receive), path.removeprefix(WORKERS_PATH)[1:])
            elif path in CONTROL_PATHS:
                what = f"a router does not pass on {path}: ask each server (GET {WORKERS_PATH} lists them)"
                raise BadRequestError(what, code="not_found", status=404)
            else:
                await self._forward(scope, receive, send)
                return
            await response(scope, receive, send)
        except ClientDisconnect:
            return

    async def _get(self, scope: Scope, path: str) -> Response:
        if path == HEALTH_PATH:
            return self._health()
        if path == METRICS_PATH:
            return await self._show_metrics()
        headers = self._forward.headers(scope)
        if path == _SESSIONS:
            lists = await self._of_all(path, headers)
            return JSONResponse({"object": "list", "data": [session for sessions in lists for session in sessions]})
        return await (self._models(headers) if path == _MODELS else self._paged(path, scope, headers))

    def _health(self) -> Response:
        if any(one.state == "healthy" for one in self._workers.answering()):
            return JSONResponse({"status": "ok"})
        states = "; ".join(f"{one.url} ({one.role}) is {one.state}" for one in self._workers) or "there are no servers"
        return JSONResponse(error_body(503, f"no server can answer now: {states}", code="no_server"), 503)

    async def _show_metrics(self) -> Response:
        """Return the figures of the router, and those of the servers that answer in time."""

        async def page(worker: Worker) -> bytes:
            try:
                async with asyncio.timeout(_METRICS_TIMEOUT_S):
                    status, body = await worker.server.get(METRICS_PATH.encode(), self._workers.headers)
            except (ServerLostError, TimeoutError):
                return b""
            return body if status == 200 else b""

        workers = [worker for worker in self._workers if worker.state != "unhealthy"]
        pages = await asyncio.gather(*map(page, workers))
        urls = [worker.url for worker in workers]
        text = await self._parsing.run(joined, self._metrics.own(), dict(zip(urls, pages, strict=True)))
        return Response(text, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _models(self, headers: Headers) -> Response:
        lists = await self._of_all(_MODELS, headers)
        models = {model["id"]: model for items in lists for model in items}
        return JSONResponse({"object": "list", "data": list(models.values())})

    async def _paged(self, path: str, scope: Scope, headers: Headers) -> Response:
        """Return a page of what all servers have. The list of each is read whole: they do not know each other's
        ids."""
        query, (most, usual) = QueryParams(scope["query_string"]), _PAGED[path]
        passed = [(name, value) for name, value in query.multi_items() if name not in ("after", "limit", "order")]
        lists = await self._of_all(path, headers, [*passed, ("limit", str(most))])
        items = [*{item["id"]: item for items in lists for item in items}.values()]  # servers may share a store
        items.sort(key=lambda item: item["created_at"])
        found, page = page_of(query, items, lambda item: str(item["id"]), most=most, usual=usual)
        return JSONResponse(page | {"data": found})

    async def _of_all(
        self, path: str, headers: Headers, query: Sequence[tuple[str, str]] = ()
    ) -> list[list[dict[str, Any]]]:
        """Return the whole list of each server that answers. Raises BadRequestError if none does."""

        async def read(worker: Worker) -> list[dict[str, Any]] | BadRequestError:
            items: list[dict[str, Any]] = []
            more: list[tuple[str, str]] = []
            try:
                async with asyncio.timeout(self._settings.health_check_timeout_s):
                    while True:
                        target = f"{path}?{urlencode([*query, *more])}" if query else path
                        status, body = await worker.server.get(target.encode(), headers)
                        answer = json.loads(body)
                        if status != 200:
                            return BadRequestError(str(answer["error"]["message"]), status=status)
                        items += answer["data"]
                        if not answer.get("has_more"):
                            return items
                        more = [("after", items[-1]["id"])]
            except (ServerLostError, TimeoutError, ValueError, KeyError, TypeError) as error:
                return BadRequestError(f"{worker.url}: {error or 'no answer in time'}", code="no_server", status=503)

        found = await asyncio.gather(*map(read, self._workers.answering()))
        lists = [items for items in found if not isinstance(items, BadRequestError)]
        if not lists:
            refusals = [items for items in found if isinstance(items, BadRequestError)]
            raise refusals[0] if refusals else BadRequestError("no server can answer now", code="no_server", status=503)
        return lists

    async def _change_workers(self, request: Request, url: str) -> Response:
        """List servers, add one, or drain one."""
        if request.method == "POST" and not url:
            body = await receive_body(request, self._settings.http)
            new = checked(json_object(body, "request body"), NewWorker)
            try:
                added = checked_url(new.url)
            except BadRequestError as error:
                error.param = "url"
                raise
            if (there := self._workers.get(added)) is not None:
                what = f"{added} is there already, and {there.state}"
                raise BadRequestError(what, param="url", code="worker_exists", status=409)
            return JSONResponse(self._shown(self._workers.add(added, new.role)), 201)
        worker = self._workers.get(url.rstrip("/"))
        if request.method == "GET" and not url:
            return JSONResponse({"workers": [self._shown(worker) for worker in self._workers]})
        if request.method not in ("GET", "DELETE") or not url:
            methods = "GET and DELETE" if url else "GET and POST"
            raise BadRequestError(f"{request.url.path} takes {methods}, not {request.method}", status=405)
        if worker is None:
            raise not_found("worker", url)
        if request.method == "DELETE":
            self._workers.drain(worker)
            return JSONResponse(self._shown(worker), 202)
        return JSONResponse(self._shown(worker))

    def _shown(self, worker: Worker) -> dict[str, Any]:
        return {
            "url": worker.url,
            "role": worker.role,
            "state": worker.state,
            "reason": worker.why or None,
            "models": None if worker.models is None else sorted(worker.models),
            "in_flight": worker.in_flight,
            "tokens_in_flight": self._workers.load_of(worker),
            "requests": worker.requests,
        }


def build_app(workers: Workers, settings: RouterSettings, metrics: RouterMetrics, parsing: Threads) -> ASGIApp:
    """Return the application, behind the same guards as a server's. Raises SettingsError for a bad file of keys."""
    return guarded(RouterApp(workers, settings, metrics, parsing), settings.http, metrics)


def guarded(app: ASGIApp, http: ServerSettings, metrics: HttpMetrics) -> ASGIApp:
    """Put the guards of a server around an application that passes requests on. Raises SettingsError for a bad file of
    keys."""
    keys = read_api_keys(http)
    if keys is not None or http.admin_api_key is not None:
        app = ApiKeyMiddleware(app, keys, http.admin_api_key, scoped=False)
    origins = tuple((http.allowed_origins or "").split(","))
    if keys is None:
        hosts = tuple((http.allowed_hosts or "").lower().split(","))
        app = WebPageGuard(app, hosts, origins, bound=http.host)
    if http.allowed_origins is not None:
        app = CORSMiddleware(
            app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=[REQUEST_ID_HEADER]
        )
    return OutermostMiddleware(app, metrics, bodies=BodyBudget(http), access_log=http.access_log)
