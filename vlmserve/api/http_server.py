"""uvicorn, with limits on clients that hold connections without using them (docs/security.md).

uvicorn limits how long a connection idles between two requests. This module limits the rest: connections, the time and
size of headers, bytes sent after an answer is refused or over, and clients that do not read. Slow bodies are refused
where they are read (`api.body`).

A connection waits until the headers of a request have arrived, and works until the answer was sent. A waiting
connection costs its client nothing and may be ended at any time. If there are too many connections, the one that has
waited longest is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import struct
import time
from collections.abc import Callable, Iterator
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import uvicorn
from starlette.responses import JSONResponse
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from vlmserve.api.errors import RETRY_AFTER_S, error_body
from vlmserve.config.settings import ServerSettings
from vlmserve_common.process.limits import open_files_limit

logger = logging.getLogger(__name__)

# asyncio accepts as many connections as its backlog before it looks at any of them: thousands would take all
# descriptors, and the limit on connections would come too late. The kernel's queue, which has the same name, is longer.
_ACCEPTED_AT_A_TIME = 32
_MAX_HEADER_BYTES = 64 * 1024
# What is read of a connection in one turn of the loop. The parser calls back for each chunk and each request in it: for
# chunks of 6 bytes 1,400 times, which takes 2 ms. Large bodies of a declared length make one call.
_PIECE_BYTES = 8 * 1024
_LARGE_PIECE_BYTES = 256 * 1024
_MOST_PIPELINED = 100
_RESET = struct.pack("ii", 1, 0)  # linger for 0 s
_SWEEP_TICKS = 5  # of uvicorn's, which are 0.1 s
# Descriptors that are not for connections: files, fetches, other processes.
_OTHER_FILES = 512
# What strangers send makes lines of these: "Invalid HTTP request", failures to accept, and too many connections.
_THROTTLED = ("uvicorn.error", "asyncio", __name__)
_MOST_MESSAGE_MIB = 32  # of a message of a WebSocket: a raw frame of 3840x2160 takes 24
SPARE = 32
"""Connections that are taken above the limit, since /health is always answered."""


class HttpServer(uvicorn.Server):
    """Serves an application until `should_exit`, without touching signals.

    backlog: connections that wait in the kernel to be accepted. started: called when connections are taken.
    websockets: the application takes them, too.
    """

    def __init__(
        self,
        app: Any,
        settings: ServerSettings,
        *,
        backlog: int,
        started: Callable[[], None],
        websockets: bool = False,
    ) -> None:
        for name in ("uvicorn", "uvicorn.error"):
            logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
        config = uvicorn.Config(
            app,
            interface="asgi3",
            http=partial(GuardedProtocol, server=self),  # type: ignore[arg-type]  # called as a class would be
            ws=GuardedWebSocket if websockets else "none",
            ws_max_size=int(min(settings.max_body_mib, _MOST_MESSAGE_MIB) * 2**20),
            ws_ping_timeout=None,  # pongs wait, too, where a connection is not read
            ws_per_message_deflate=False,  # a small message could become a large one
            log_config=None,
            access_log=False,  # the frontend's own has durations and request ids
            lifespan="off",
            backlog=_ACCEPTED_AT_A_TIME,
            timeout_keep_alive=settings.keep_alive_timeout_s,  # type: ignore[arg-type]  # call_later takes it
            server_header=False,
            forwarded_allow_ips=settings.forwarded_allow_ips,
        )
        super().__init__(config)
        most = _most_connections(settings.max_connections)
        self.guard = Connections(most, settings, cast("set[GuardedProtocol]", self.server_state.connections))
        self.refuse = _Refusal(settings.max_connections, most)
        self._backlog = backlog
        self._started = started
        self._quiet = OnceInAWhile()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the launcher: uvicorn would raise them again before anything is cleaned up."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to take connections."""
        for name in _THROTTLED:
            logging.getLogger(name).addFilter(self._quiet)
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(self._backlog)
        self._started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more connections, and wait for those at work."""
        try:
            await super().shutdown(sockets)
        finally:
            for name in _THROTTLED:
                logging.getLogger(name).removeFilter(self._quiet)

    async def on_tick(self, counter: int) -> bool:
        """Take uvicorn's turn, every 0.1 s."""
        if counter % _SWEEP_TICKS == 0:
            self.guard.sweep()
        return await super().on_tick(counter)


class Connections:
    """All connections of one server, in one event loop. most: the limit. open: as the HTTP server counts them."""

    def __init__(self, most: int, settings: ServerSettings, open: set[GuardedProtocol]) -> None:
        self._most = most
        self._settings = settings
        self._open = open
        # Those without a request in work, the longest waiting first, and until when each may wait.
        self.waiting: dict[GuardedProtocol, float] = {}
        self.stuck: dict[GuardedProtocol, float] = {}  # those whose clients take no bytes, and since when

    @property
    def crowded(self) -> bool:
        """Return True if more connections work than the limit."""
        return len(self._open) - len(self.waiting) > self._most

    def admit(self, new: GuardedProtocol) -> bool:
        """Take a new connection, which is in `open` already. Returns False if there is no room for it at all."""
        if len(self._open) > self._most + SPARE:
            if not self.waiting:
                return False
            next(iter(self.waiting)).drop()
        self.reads_headers(new)
        return True

    def idles(self, connection: GuardedProtocol) -> None:
        """Note that a connection was answered. The HTTP server decides how long it is kept."""
        self.waiting[connection] = math.inf

    def reads_headers(self, connection: GuardedProtocol) -> None:
        """Note that a connection has to send a request from now on."""
        self.waiting.pop(connection, None)
        self.waiting[connection] = time.monotonic() + self._settings.header_timeout_s

    def works(self, connection: GuardedProtocol) -> None:
        """Note that the request of a connection is there."""
        self.waiting.pop(connection, None)

    def forget(self, connection: GuardedProtocol) -> None:
        """Forget a connection that has ended."""
        self.waiting.pop(connection, None)
        self.stuck.pop(connection, None)

    def sweep(self) -> None:
        """End the connections whose time is over. Call this every now and then."""
        now = time.monotonic()
        for connection in [each for each, until in self.waiting.items() if until <= now]:
            self.waiting.pop(connection, None)
            connection.give_up()
        for connection in list(self._open):
            if not connection.stuck:
                self.stuck.pop(connection, None)
            elif now - self.stuck.setdefault(connection, now) >= self._settings.send_timeout_s:
                connection.cut()


class GuardedProtocol(HttpToolsProtocol):
    """One connection, which reports its state to `Connections` and ends when that says so."""

    def __init__(self, *, server: HttpServer, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self._guard = server.guard
        self._refuse = server.refuse
        self._header_bytes = 0
        self._in_body = False  # also of a request that was answered before its end

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Report the open connection."""
        transport.max_size = _PIECE_BYTES  # type: ignore[attr-defined]  # of asyncio's transports of sockets
        super().connection_made(transport)
        if not self._guard.admit(self):
            self._refuse_connection()

    def connection_lost(self, exc: Exception | None) -> None:
        """Report that the connection has ended."""
        self._guard.forget(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count the bytes of headers."""
        if self._idles:
            self._guard.reads_headers(self)
        if not self._in_body:
            self._header_bytes += len(data)
        super().data_received(data)
        if self._header_bytes > _MAX_HEADER_BYTES and self in self._guard.waiting and not self._in_body:
            self._end_with(431, f"the request's headers are longer than {_MAX_HEADER_BYTES} bytes", "headers_too_large")

    def on_message_begin(self) -> None:
        """Begin a request, unless too many wait behind each other already: the parser ends at an error."""
        if len(self.pipeline) >= _MOST_PIPELINED:
            raise OverflowError
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Report the request, or refuse it if the server is crowded."""
        self._guard.works(self)
        self._header_bytes, self._in_body = 0, True
        crowded = self._guard.crowded and self.url.partition(b"?")[0] != b"/health"
        self.app = self._refuse if crowded else self.config.loaded_app
        names = [name for name, _ in self.headers]
        if names.count(b"host") > 1:
            self.app = _answer(400, "the request has more than one Host header", "invalid_host")
        if b"content-length" in names:
            self.transport.max_size = _LARGE_PIECE_BYTES  # type: ignore[attr-defined]
        super().on_headers_complete()

    def _should_upgrade(self) -> bool:
        return self.app is self.config.loaded_app and super()._should_upgrade()

    def on_message_complete(self) -> None:
        """Note that the whole request is there."""
        self._in_body = False
        self.transport.max_size = _PIECE_BYTES  # type: ignore[attr-defined]
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP request, or one of too many at a time."""
        if len(self.pipeline) >= _MOST_PIPELINED:
            msg = f"more than {_MOST_PIPELINED} requests were sent without waiting for an answer"
        self._end_with(400, msg, "invalid_http")

    def on_response_complete(self) -> None:
        """Report that the answer was written."""
        more = bool(self.pipeline)
        super().on_response_complete()
        if not more and not self.transport.is_closing():
            self._guard.idles(self)

    def resume_writing(self) -> None:
        """Report that the client takes the bytes sent to it."""
        self._guard.stuck.pop(self, None)
        super().resume_writing()

    def drop(self) -> None:
        """End the waiting connection. A client that was answered before may just ask again on another one."""
        if self._idles:
            self._guard.works(self)  # it is not to be dropped again
            self.transport.close()
        else:
            self._refuse_connection()

    def give_up(self) -> None:
        """End the connection. A client that sent nothing gets no answer: it would take the answer for a later
        request's."""
        if self._header_bytes:
            self._end_with(408, "the request's headers did not come in time (setting --header-timeout-s)", "timeout")
        else:
            self.transport.close()

    @property
    def stuck(self) -> bool:
        """Return True if an answer is over or cannot go on, and some of it was not taken."""
        over = self.cycle is None or self.cycle.response_complete or self.transport.is_closing()
        return (over or self.flow.write_paused) and self.transport.get_write_buffer_size() > 0

    def cut(self) -> None:
        """End the connection, and keep the kernel from sending the rest."""
        self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.transport.abort()

    @property
    def _idles(self) -> bool:
        """Return True if the connection was answered, and has sent nothing since."""
        return self._guard.waiting.get(self) == math.inf

    def _refuse_connection(self) -> None:
        logger.warning(_REFUSED, self._refuse.message)
        self._end_with(503, self._refuse.message, "too_many_connections")

    def _end_with(self, status: int, message: str, code: str) -> None:
        self._guard.works(self)
        answer = _answer(status, message, code)
        head = [b"HTTP/1.1 %d %s" % (status, HTTPStatus(status).phrase.encode())]
        head += [name + b": " + value for name, value in answer.raw_headers]
        self.transport.write(b"\r\n".join([*head, b"", bytes(answer.body)]))
        self.transport.close()


_REFUSED = "clients are answered 503: %s"


class GuardedWebSocket(WebSocketsSansIOProtocol):
    """One WebSocket. It counts as a connection that works. Pings find out whether its client is there."""

    stuck = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin, with larger pieces than those of headers."""
        transport.max_size = _LARGE_PIECE_BYTES  # type: ignore[attr-defined]
        super().connection_made(transport)


class _Refusal:
    """The application that answers while there are too many connections. setting: the limit as given. limit: the limit
    as the system allows it."""

    def __init__(self, setting: int, limit: int) -> None:
        why = (
            "the limit"
            if limit == setting
            else f"the limit, as few files may be open (ulimit -n {open_files_limit()}),"
        )
        self.message = f"more than {limit} connections are open, {why} is {limit} (setting --max-connections)"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        logger.warning(_REFUSED, self.message)
        await _answer(503, self.message, "too_many_connections")(scope, receive, send)


def _most_connections(setting: int) -> int:
    limit = open_files_limit()
    most = min(setting, max(limit // 2, limit - _OTHER_FILES))
    if most < setting:
        logger.warning(
            "--max-connections is %d, but the system allows %d open files (ulimit -n): %d connections are taken",
            setting,
            limit,
            most,
        )
    return most


def _answer(status: int, message: str, code: str) -> JSONResponse:
    headers = {"connection": "close"} | ({"retry-after": str(RETRY_AFTER_S)} if status == 503 else {})
    return JSONResponse(error_body(status, message, code=code), status, headers=headers)


class OnceInAWhile(logging.Filter):
    """Lets a message through once in `interval_s` seconds; the next one tells how many were left out. clock: in
    seconds.

    Messages with the same text before values are put in count as the same.
    """

    def __init__(self, interval_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._interval_s = interval_s
        self._clock = clock
        self._seen: dict[str, tuple[float, int]] = {}  # when it came last, and how many were held back since

    def filter(self, record: logging.LogRecord) -> bool:
        """Return True if the message goes through."""
        text, now = str(record.msg).partition("\n")[0], self._clock()  # asyncio's goes on with what differs
        last, held = self._seen.get(text, (None, 0))
        if last is not None and now - last < self._interval_s:
            self._seen[text] = (last, held + 1)
            return False
        self._seen[text] = (now, 0)
        if held:
            record.msg = f"{record.msg} ({held} more such lines were left out)"
        return True
