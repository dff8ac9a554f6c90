"""A WebSocket's way through the router: messages pass in both directions, and when one side ends, so does the other.

A side that does not read holds up the other one: the router keeps one message of each direction, and what the kernel
holds.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import time
from contextlib import suppress
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException

from vlmserve.api.body import BodyBudget
from vlmserve.api.errors import describe, error_body, not_found
from vlmserve.api.request_id import given_id, new_id
from vlmserve.frontend.openai.json_bodies import json_text
from vlmserve.router.demand import Wish
from vlmserve.router.forwarding import Forwarding, passed_back
from vlmserve.router.metrics import RouterMetrics
from vlmserve.router.settings import RouterSettings
from vlmserve.router.workers import REQUEST_TOKENS, Place, Worker, Workers
from vlmserve.routing.replicas import Demand
from vlmserve_common.errors import BadRequestError, first_line

logger = logging.getLogger(__name__)

_FRAMES = re.compile(r"/v1/sessions/([^/]+)/frames")
_MOST_WAITING = 4  # messages of a server that the client has not taken
_SWITCHED = 101
_NORMAL, _BROKEN, _FAILED, _FULL = 1000, 1006, 1011, 1013  # codes that end a WebSocket
_NEVER_SENT = (1005, _BROKEN, 1015)  # they stand for an end without a code
_GONE = (OSError, RuntimeError)  # what sending raises when the client has left, or has said that it leaves
_OWN = b"sec-websocket-"


class Relay:
    """Passes the WebSockets of sessions on to the servers that hold them."""

    def __init__(
        self, workers: Workers, settings: RouterSettings, metrics: RouterMetrics, forwarding: Forwarding
    ) -> None:
        self._workers = workers
        self._settings = settings
        self._metrics = metrics
        self._forwarding = forwarding
        self._numbers = itertools.count()
        self._budget = BodyBudget(settings.http, "the frames on their way to servers")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope.setdefault("state", {})
        state.setdefault("request_id", given_id(scope["headers"]) or new_id("req"))
        await receive()  # that there is a WebSocket
        status = _SWITCHED
        try:
            place = await self._place(scope)
            try:
                refusal = await self._pass_on(scope, receive, send, place.worker)
            finally:
                self._workers.ended(place)
        except BadRequestError as error:
            status, body = describe(error)
            refusal = JSONResponse(body, status)
            self._metrics.observe_refusal(error.code or "unavailable")
        except OSError:  # the client left
            return
        if refusal is not None:
            status = refusal.status_code
            await refusal(scope, receive, send)
        self._metrics.observe_http(scope["path"], status)

    async def _place(self, scope: Scope) -> Place:
        """Take a place at the server that holds a WebSocket's session. Raises BadRequestError."""
        found = _FRAMES.fullmatch(scope["path"])
        if found is None:
            what = f"a router passes on no WebSocket at {scope['path'][:200]}: it is for those of live video"
            raise BadRequestError(what, code="not_found", status=404)
        holder = await self._forwarding.holder(scope["raw_path"], (), self._headers(scope))
        if holder is None and len(self._workers.answering()) > 1:
            raise not_found("session", found[1])
        # its frames are work, so sessions that are opened one after the other spread
        demand = Demand(rids=(f"websocket {next(self._numbers)}",), answer=REQUEST_TOKENS)
        place = self._workers.place(Wish(demand=demand), (), holder)
        if place is None:
            at = "" if holder is None else f": the session is at {holder.url}"
            raise BadRequestError(f"no server can answer now{at}", code="no_server", status=503)
        return place

    def _headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        return [(name, value) for name, value in self._forwarding.headers(scope) if not name.startswith(_OWN)]

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send, worker: Worker) -> Response | None:
        """Pass messages on until both sides have ended. Returns the server's answer if it takes no WebSocket. Raises
        BadRequestError if there is no answer, and OSError if the client left before."""
        began, settings = time.perf_counter(), self._settings
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        try:
            server = await connect(
                worker.server.websocket_url(target),
                additional_headers=[(name.decode(), value.decode("latin-1")) for name, value in self._headers(scope)],
                user_agent_header=None,
                compression=None,
                proxy=None,
                open_timeout=settings.connect_timeout_s,
                close_timeout=settings.drain_timeout_s,  # a server reads what came before the end as it has room
                ping_interval=None,  # a server that has no room reads none; health checks tell whether it is there
                max_queue=_MOST_WAITING,
            )
        except InvalidStatus as refused:
            answer = refused.response
            self._metrics.answered(worker.url, answer.status_code, time.perf_counter() - began)
            response = Response(bytes(answer.body or b""), answer.status_code)
            headers = [(name.lower().encode(), text.encode("latin-1")) for name, text in answer.headers.raw_items()]
            response.raw_headers = passed_back(headers)
            return response
        except (WebSocketException, OSError) as error:  # a timeout, too
            self._metrics.failed(worker.url, "unreachable")
            worker.look.set()
            why = first_line(error) or "no connection in time (--connect-timeout-s)"
            what = f"the session is at {worker.url}, which cannot answer now: {why}"
            raise BadRequestError(what, code="no_server", status=503) from None
        self._metrics.answered(worker.url, _SWITCHED, time.perf_counter() - began)
        worker.server.websockets.add(server.transport)
        self._metrics.open_websockets(worker.url, 1)
        try:
            await send({"type": "websocket.accept"})
            await _Passage(
                *(receive, send, server),
                worker=worker,
                budget=self._budget,
                metrics=self._metrics,
                patience_s=settings.http.send_timeout_s,
            ).run()
        finally:
            server.transport.abort()  # if it is still open
            worker.server.websockets.discard(server.transport)
            self._metrics.open_websockets(worker.url, -1)
        return None


class _Passage:
    """An open WebSocket between a client and a server. budget: for messages on their way to the server."""

    def __init__(
        self,
        receive: Receive,
        send: Send,
        server: ClientConnection,
        *,
        worker: Worker,
        budget: BodyBudget,
        metrics: RouterMetrics,
        patience_s: float,
    ) -> None:
        self._receive = receive
        self._send = send
        self._server = server
        self._worker = worker
        self._budget = budget
        self._metrics = metrics
        self._patience_s = patience_s
        self._left: int | None = None  # with this code

    async def run(self) -> None:
        """Pass messages on in both directions, until both sides have ended."""
        up, down = asyncio.create_task(self._up()), asyncio.create_task(self._down())
        server, worker = self._server, self._worker
        try:
            await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
            if self._left is not None:
                await server.close(_sendable(self._left))  # behind all that came before
            elif up.done() and (full := up.result()) is not None:
                await self._end(_FULL, full.code or "", describe(full)[1])
                await server.close()
            else:
                await asyncio.wait((down,), timeout=self._patience_s)  # the server's last words
                if server.close_code in (None, _BROKEN):
                    self._metrics.failed(worker.url, "broken")
                    worker.look.set()
                    logger.warning("a WebSocket of %s broke off", worker.url)
                    lost = error_body(502, "the server was lost", code="server_lost")
                    await self._end(_FAILED, "server_lost", lost)
                else:
                    await self._end(_sendable(server.close_code), server.close_reason or "")
        finally:
            for task in (up, down):
                task.cancel()
            await asyncio.gather(up, down, return_exceptions=True)

    async def _up(self) -> BadRequestError | None:
        """Pass the client's messages on until one side ends. Returns an error if there is no room for a message."""
        while True:
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                self._left = message.get("code") or _NORMAL
                return None
            data = message.get("bytes")
            data = message["text"] if data is None else data
            try:
                self._budget.take(len(data))
            except BadRequestError as full:
                return full
            try:
                await self._server.send(data)
            except ConnectionClosed:
                return None
            finally:
                self._budget.held -= len(data)
            self._metrics.passed(self._worker.url, "to_server")

    async def _down(self) -> None:
        """Pass the server's messages on until it ends. Those for a client that is gone are dropped."""
        with suppress(ConnectionClosed):
            while True:
                data = await self._server.recv()
                with suppress(*_GONE):
                    await self._send({"type": "websocket.send", "text" if isinstance(data, str) else "bytes": data})
                    self._metrics.passed(self._worker.url, "to_client")

    async def _end(self, code: int, reason: str, error: dict[str, Any] | None = None) -> None:
        """End the client's side, after a message about the error."""
        with suppress(*_GONE):
            if error is not None:
                await self._send({"type": "websocket.send", "text": json_text({"type": "error", **error}).decode()})
            await self._send({"type": "websocket.close", "code": code, "reason": reason})


def _sendable(code: int) -> int:
    return _NORMAL if code in _NEVER_SENT else code
