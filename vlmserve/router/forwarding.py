"""A request's way through the router: to a server, to another one if that fails, and the answer's way back.

A request that failed before its answer began is sent elsewhere. Once bytes of an answer were passed on, a failure is
the end of the answer: an error event in a stream of events, or a broken connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import TypeAlias

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from vlmserve.api.body import body_parts, check_values, receive_body
from vlmserve.api.errors import error_body
from vlmserve.api.request_id import HEADER as REQUEST_ID
from vlmserve.frontend.openai.json_bodies import sse_event
from vlmserve.router.demand import Wish, wish_of
from vlmserve.router.metrics import RouterMetrics
from vlmserve.router.settings import RouterSettings
from vlmserve.router.upstream import Answer, Body, Headers, ServerLostError
from vlmserve.router.workers import Place, Worker, Workers
from vlmserve.routing.replicas import Demand
from vlmserve_common.errors import BadRequestError
from vlmserve_common.process.threads import Threads

logger = logging.getLogger(__name__)

_HOP = (b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"proxy-connection")
_NOT_PASSED_ON = frozenset(
    (*_HOP, b"host", b"content-length", b"expect", b"origin", b"x-forwarded-for", REQUEST_ID.lower().encode())
)
_NOT_PASSED_BACK = frozenset((*_HOP, b"date"))
_ELSEWHERE = {429: "full", 502: "unavailable", 503: "unavailable"}
_UPLOADS = "/v1/files"
_ONCE = ("/v1/batches", _UPLOADS)
# Only one server has the thing of such an id, in paths and in what created it.
_OF_ONE_SERVER = re.compile(r"/v1/((files|batches|responses|sessions)/[^/]+)")
_CREATED = {f"/v1/{kind}": kind for kind in ("files", "batches", "responses", "sessions")}
_ID = re.compile(rb'"id": ?"([\w.:-]{1,200})"')
_MOST_IDS = 2**14
_INLINE_BYTES = 256 * 1024
_WATCHED_FROM_S = 0.02
Refusal: TypeAlias = tuple[int, Headers, bytes]
"""An answer's status, headers and body."""


@dataclass(kw_only=True, eq=False, slots=True)
class _Exchange:
    """A request in work. at: the only server that may answer it. began: by time.perf_counter. left: the client is gone;
    then the answer that is being made for it is aborted."""

    scope: Scope
    send: Send
    headers: Headers
    body: Body
    wish: Wish
    at: Worker | None
    began: float
    left: bool = False
    answer: Answer | None = None

    @property
    def path(self) -> str:
        return str(self.scope["path"])

    @property
    def is_buffered(self) -> bool:
        """Return True if the body can be sent again."""
        return isinstance(self.body, bytes | bytearray)

    @property
    def is_repeatable(self) -> bool:
        """Return True if the request may reach a server twice."""
        return self.is_buffered and (self.scope["method"] != "POST" or self.path not in _ONCE)

    def waits_for(self, answer: Answer | None) -> None:
        """Note the answer that is being made."""
        self.answer = answer
        if self.left and answer is not None:
            answer.abort("the client left")

    async def watch(self, receive: Receive) -> None:
        """Wait until the client leaves. The request's body must have been read."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left = True
        self.waits_for(self.answer)


class Forwarding:
    """Passes requests on to servers, and their answers back. parsing: reads large bodies."""

    def __init__(self, workers: Workers, settings: RouterSettings, metrics: RouterMetrics, parsing: Threads) -> None:
        self._workers = workers
        self._settings = settings
        self._metrics = metrics
        self._parsing = parsing
        self._rids = itertools.count()
        self._holders: OrderedDict[str, str] = OrderedDict()  # a path behind /v1/ -> the URL of its server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. Raises BadRequestError if no server does."""
        began, request, http = time.perf_counter(), Request(scope, receive), self._settings.http
        owner, rid = scope["state"].get("owner", ""), str(next(self._rids))
        body: Body
        if scope["method"] == "POST" and scope["path"] == _UPLOADS:
            # Requests may name several files of their client, so these have to be at one server.
            client = owner or (scope.get("client") or ("",))[0]
            body, wish = body_parts(request, http), Wish(demand=Demand(rids=(rid,), session=f"uploads {client}"))
        else:
            body = await receive_body(request, http)
            wish = Wish(demand=Demand(rids=(rid,)))
            form = request.headers.get("content-type", "").lower().startswith("multipart/form-data")
            if body and scope["method"] == "POST" and not form:
                wish = await self._wish(body, owner, rid)
        headers = self.headers(scope)
        exchange = _Exchange(scope=scope, send=send, headers=headers, body=body, wish=wish, at=None, began=began)
        watching: list[asyncio.Task[None]] = []
        loop = asyncio.get_running_loop()
        # Most answers of a few milliseconds are not waited for by two tasks.
        watch = loop.call_later(_WATCHED_FROM_S, lambda: watching.append(loop.create_task(exchange.watch(receive))))
        if not exchange.is_buffered:  # the client is watched while it sends
            watch.cancel()
        try:
            exchange.at = await self.holder(scope["raw_path"], wish.at, headers)
            await self._answer(exchange)
        finally:
            watch.cancel()
            for task in watching:
                task.cancel()

    def headers(self, scope: Scope) -> Headers:
        """Return the headers that are passed on."""
        passed = [(name, value) for name, value in scope["headers"] if name not in _NOT_PASSED_ON]
        if self._workers.headers:
            passed = [(name, value) for name, value in passed if name != b"authorization"]
        host = (scope.get("client") or ("",))[0]
        more = [(REQUEST_ID.lower().encode(), scope["state"]["request_id"].encode())]
        more += [(b"x-forwarded-for", host.encode())] if host else []
        return [*passed, *self._workers.headers, *more]

    async def _wish(self, body: bytearray, owner: str, rid: str) -> Wish:
        check_values(body, self._settings.http.max_json_values)
        if len(body) <= _INLINE_BYTES:
            return wish_of(body, owner, rid)
        return await self._parsing.run(wish_of, body, owner, rid)

    async def holder(self, raw_path: bytes, named: Sequence[str], headers: Headers) -> Worker | None:
        """Return the server that has what a request needs; None if any may answer, or none has it. named: the things
        that its body names."""
        found = _OF_ONE_SERVER.match(raw_path.decode("latin-1"))
        things = (found[1],) if found else named
        if not things:
            return None
        known = self._workers.get(self._holders.get(things[0], ""))
        there = self._workers.answering()
        if known in there or (known is None and len(there) < 2):
            return known
        # Another server has it, too, if they share a store.
        has = await asyncio.gather(*(self._has(worker, things[0], headers) for worker in there))
        holder = next((worker for worker, it in zip(there, has, strict=True) if it), known)
        if holder is not None:
            self._remember(things[0], holder)
        return holder

    async def _has(self, worker: Worker, thing: str, headers: Headers) -> bool:
        plain = [(name, value) for name, value in headers if name != b"content-type"]
        with contextlib.suppress(ServerLostError, TimeoutError):
            async with asyncio.timeout(self._settings.health_check_timeout_s):
                return (await worker.server.get(b"/v1/" + thing.encode(), plain))[0] == 200
        return False

    def _remember(self, thing: str, worker: Worker) -> None:
        self._holders[thing] = worker.url
        self._holders.move_to_end(thing)
        if len(self._holders) > _MOST_IDS:
            self._holders.popitem(last=False)

    async def _answer(self, exchange: _Exchange) -> None:
        """Try one server after another, and pass on the first answer that is none of `_ELSEWHERE`."""
        tried: list[Worker] = []
        failures: list[str] = []
        refused: Refusal | None = None
        while (place := self._workers.place(exchange.wish, tried, exchange.at)) is not None:
            failed = place.worker
            try:
                refused = await self._try(exchange, place)
                if refused is None:
                    return
                reason = _ELSEWHERE[refused[0]]
                if refused[0] != HTTPStatus.TOO_MANY_REQUESTS:
                    failed.look.set()
            except ServerLostError as error:
                if exchange.left:
                    return
                failures.append(f"{failed.url}: {error}")
                if not error.reached:
                    reason = "unreachable"
                    failed.suspect(str(error))
                elif exchange.is_repeatable:
                    reason = "lost"
                    failed.look.set()
                else:
                    what = "the server was lost before its answer began; what was asked for may have been done"
                    raise BadRequestError(what, code="server_lost", status=502) from None
            finally:
                self._workers.ended(place)
            self._metrics.failed(failed.url, reason)
            if exchange.left:
                return
            tried.append(failed)
            if refused is not None and not exchange.is_buffered:
                break  # the upload is gone
        if refused is not None:
            status, headers, content = refused
            await exchange.send({"type": "http.response.start", "status": status, "headers": passed_back(headers)})
            await exchange.send({"type": "http.response.body", "body": content})
            return
        what = "no server can answer now"
        if exchange.at is not None:
            what = f"what the request names is at {exchange.at.url}, which cannot answer now"
        raise BadRequestError("; ".join([what, *failures]), code="no_server", status=503)

    async def _try(self, exchange: _Exchange, place: Place) -> Refusal | None:
        """Ask a server, and pass its answer back. Returns an answer that another server may not give. Raises
        ServerLostError if there was no answer."""
        scope = exchange.scope
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        answer = await place.worker.server.ask(
            *(scope["method"], target, exchange.headers, exchange.body),
            repeatable=exchange.is_repeatable,
            begun=exchange.waits_for,
        )
        try:
            if answer.status in _ELSEWHERE:
                return answer.status, answer.headers, await answer.whole()
            first = await answer.part()
            self._metrics.answered(place.worker.url, answer.status, time.perf_counter() - exchange.began)
            await self._relay(exchange, place, answer, first)
            self._metrics.ended(place.worker.url, time.perf_counter() - exchange.began)
        finally:
            exchange.waits_for(None)
            answer.close()
        return None

    async def _relay(self, exchange: _Exchange, place: Place, answer: Answer, part: bytes) -> None:
        """Pass an answer back as it comes. part: its first one."""
        send, created = exchange.send, _CREATED.get(exchange.path) if exchange.scope["method"] == "POST" else None
        if created is not None and answer.status == HTTPStatus.OK and (found := _ID.search(part)):
            self._remember(f"{created}/{found[1].decode()}", place.worker)
        await send({"type": "http.response.start", "status": answer.status, "headers": passed_back(answer.headers)})
        last = part
        try:
            while part and not answer.is_whole:
                await send({"type": "http.response.body", "body": part, "more_body": True})
                last = part
                part = await answer.part()
            await send({"type": "http.response.body", "body": part})
        except ServerLostError as error:
            if exchange.left:
                return
            place.worker.look.set()
            self._metrics.failed(place.worker.url, "broken")
            logger.warning("an answer of %s broke off: %s", place.worker.url, error)
            # The connection of an answer that is no stream of events ends without the answer's end.
            if _is_events(answer.headers) and last.endswith(b"\n\n"):
                failure = error_body(502, "the server was lost in the middle of its answer", code="server_lost")
                await send({"type": "http.response.body", "body": sse_event(failure)})


def passed_back(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Return the headers of a server's answer that its client gets."""
    return [(name, value) for name, value in headers if name not in _NOT_PASSED_BACK]


def _is_events(headers: Headers) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)
