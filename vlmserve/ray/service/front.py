"""The front of several replicas: it reads a request's body, so that the request can go where its beginning was before.

A request that failed before its answer began is sent to another replica, once. Once bytes of an answer were passed on,
a failure is the end of the answer: an error event in a stream of events, or a broken connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vlmserve.api.auth import CONTROL_PATHS, METRICS_PATH
from vlmserve.api.body import HeldBody, body_parts, check_values, receive_body
from vlmserve.api.errors import error_body
from vlmserve.api.request_id import HEADER as REQUEST_ID
from vlmserve.config.settings import ServerSettings
from vlmserve.frontend.openai.json_bodies import sse_event
from vlmserve.ray.service.choosing import Order
from vlmserve.ray.service.replica import Through
from vlmserve.router.app import guarded
from vlmserve.router.demand import Wish, wish_of
from vlmserve.router.metrics import CONTENT_TYPE_LATEST, joined
from vlmserve.routing.replicas import Demand
from vlmserve_common.errors import BadRequestError, first_line
from vlmserve_common.logs import configure_logging
from vlmserve_common.process.threads import Threads

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

logger = logging.getLogger(__name__)

_UPLOADS = "/v1/files"
# Without a store that all share (--database-url), these are kept at one replica, the oldest: whichever front is asked,
# it finds them there. Answers of /v1/responses are kept, too, for those that go on from them.
_KEPT = ("/v1/files", "/v1/batches", "/v1/responses")
_ONCE = ("/v1/files", "/v1/batches")
_INLINE_BYTES = 256 * 1024
_MULTIPART_BYTES = 2**20
_PASSED_ON = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path")


class NoMetrics:
    """Counts nothing: the replicas count their requests."""

    def observe_http(self, path: str, status: int) -> None:
        """Ignore an answered request."""

    def observe_refusal(self, reason: str) -> None:
        """Ignore a refused request."""


class FrontApp:
    """Sends requests to replicas, and their answers back. handle: of the replicas' deployment."""

    def __init__(self, settings: ServerSettings, handle: DeploymentHandle) -> None:
        self._settings = settings
        self._answer: Any = handle.options(stream=True).answer
        self._parsing = Threads("bodies", 1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path in CONTROL_PATHS:
            what = f"{path} is for one server, and there are several replicas here"
            raise BadRequestError(what, code="not_found", status=404)
        if path == METRICS_PATH:
            await Response(await self._figures(scope), media_type=CONTENT_TYPE_LATEST)(scope, receive, send)
            return
        request, is_post = Request(scope, receive), scope["method"] == "POST"
        try:
            uploads = is_post and path == _UPLOADS
            body = await (self._upload(request) if uploads else receive_body(request, self._settings))
        except ClientDisconnect:
            return
        wish = _no_wish()
        if body and is_post and not uploads:
            wish = await self._wish(body, scope, wish.demand.rids[0])
        at_one = self._settings.database_url is None and (
            bool(wish.at) or any(path == kept or path.startswith(kept + "/") for kept in _KEPT)
        )
        order = Order(demand=wish.demand, number=0 if at_one else None, scope=_passed_on(scope), body=bytes(body))
        await self._deliver(order, send, repeatable=not (is_post and path in _ONCE))

    async def _figures(self, scope: Scope) -> bytes:
        """Return the figures of all replicas, each with a label for its replica."""
        pages: dict[str, bytes] = {}
        for number in itertools.count():
            order = Order(demand=_no_wish().demand, number=number, scope=_passed_on(scope), body=b"")
            name, page = "", b""
            try:
                async for item in self._answer.remote(order):
                    if isinstance(item, str):
                        name = item
                    else:
                        page += b"".join(message.get("body", b"") for message in item)
            except RayError as error:
                raise BadRequestError(first_line(error), code="replica_lost", status=503) from None
            if name in pages:  # one was asked again, so all were
                return await self._parsing.run(joined, (), pages)
            pages[name] = page
        raise AssertionError

    async def _upload(self, request: Request) -> bytearray:
        """Return the body of an upload: a file, and what surrounds it."""
        body: HeldBody = request.state.body
        limit = self._settings.max_file_bytes + _MULTIPART_BYTES
        async for part in body_parts(request, self._settings):
            if len(body.data) + len(part) > limit:
                what = f"the upload is larger than {self._settings.max_file_bytes} bytes (setting --max-file-bytes)"
                raise BadRequestError(what, code="file_too_large", status=413)
            body.add(part)
        return body.data

    async def _wish(self, body: bytearray, scope: Scope, rid: str) -> Wish:
        check_values(body, self._settings.max_json_values)
        owner = scope["state"].get("owner", "")
        if len(body) <= _INLINE_BYTES:
            return wish_of(body, owner, rid)
        return await self._parsing.run(wish_of, body, owner, rid)

    async def _deliver(self, order: Order, send: Send, *, repeatable: bool) -> None:
        """Ask a replica, and another one if that cannot answer."""
        relay = _Relay(send)
        for last in (not repeatable, True):
            try:
                if await relay.passes(self._answer.remote(order), hold_503=not last):
                    return
                why = "it answered 503"
            except (BackPressureError, DeploymentUnavailableError) as error:
                raise BadRequestError(first_line(error), code="no_replica", status=503) from None
            except RayError as error:
                why = first_line(error)
                if relay.begun:
                    await relay.breaks_off(why)
                    return
                if last:
                    what = "the replica was lost before its answer began"
                    if not repeatable:
                        what += "; what was asked for may have been done"
                    logger.warning("%s: %s", what, why)
                    raise BadRequestError(what, code="replica_lost", status=503) from None
            logger.warning("a request goes to another replica than %s: %s", relay.replica or "the first", why)
            demand = replace(order.demand, rids=(secrets.token_hex(8),))  # the end of the first may be noted later
            order = replace(order, demand=demand, avoid=(relay.replica,) if relay.replica else ())


class _Relay:
    """The way of one answer to the client. replica: the name of the last that was asked. begun: something was sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._events = False
        self._last = b""
        self.replica = ""
        self.begun = False

    async def passes(self, answer: Any, *, hold_503: bool) -> bool:
        """Pass an answer on. Returns False, with nothing sent, for a 503 if these are held."""
        self.replica = ""
        ended = False
        try:
            async for item in answer:
                if isinstance(item, str):
                    self.replica = item
                    continue
                for message in item:
                    if message["type"] == "http.response.start":
                        if hold_503 and message["status"] == 503:
                            return False
                        kinds = [value for name, value in message["headers"] if name.lower() == b"content-type"]
                        self._events = any(kind.startswith(b"text/event-stream") for kind in kinds)
                    self.begun = True
                    self._last = message.get("body") or self._last
                    await self._send(message)
            ended = True
            return True
        finally:
            if not ended:  # the client left, or nobody wants the rest
                with contextlib.suppress(RayError, asyncio.CancelledError):
                    answer.cancel()

    async def breaks_off(self, why: str) -> None:
        """End an answer in its middle."""
        logger.warning("an answer of %s broke off: %s", self.replica, why)
        if not (self._events and self._last.endswith(b"\n\n")):
            raise ConnectionError("the replica was lost in the middle of its answer")
        failure = error_body(502, "the replica was lost in the middle of its answer", code="replica_lost")
        await self._send({"type": "http.response.body", "body": sse_event(failure)})


def _no_wish() -> Wish:
    return Wish(demand=Demand(rids=(secrets.token_hex(8),)))


class Front:
    """The deployment of fronts. app: Serve sets it."""

    app: Through

    def __init__(self, settings: ServerSettings, handle: DeploymentHandle) -> None:
        configure_logging(settings.log_level, f"front-{serve.get_replica_context().replica_id.unique_id}")
        self._made = guarded(FrontApp(settings, handle), settings, NoMetrics())

    async def check_health(self) -> None:
        """Take requests, from the first call on."""
        self.app.inner = self._made


def _passed_on(scope: Scope) -> dict[str, Any]:
    """Return what a replica needs of a request's scope."""
    name = REQUEST_ID.lower().encode()
    headers = [(key, value) for key, value in scope["headers"] if key.lower() not in (name, b"origin")]
    headers.append((name, scope["state"]["request_id"].encode()))
    client = scope.get("client")
    return {
        **{key: scope[key] for key in _PASSED_ON if key in scope},
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "headers": headers,
        "client": tuple(client) if client else None,
        "server": None,
    }
