"""uvicorn, with limits on clients that hold connections without using them (docs/security.md).

uvicorn limits how long a connection idles between two requests. This module limits the rest: connections, the time and
size of headers, bytes sent after an answer is refused or over, and clients that do not read. Slow bodies are refused
where they are read (`api.body`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import struct
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from vlmserve.api.connections import ConnectionLimits, Connections
from vlmserve.api.errors import RETRY_AFTER_S, error_body
from vlmserve.config.settings import ServerSettings
from vlmserve_common.process.limits import open_files_limit

logger = logging.getLogger(__name__)

# asyncio accepts as many connections as its backlog before it looks at any of them: thousands would take all
# descriptors, and the limit on connections would come too late. The kernel's queue, which has the same name, is longer.
_AT_A_TIME = 32
_MAX_HEADER_BYTES = 64 * 1024
_RESET = struct.pack("ii", 1, 0)  # linger for 0 s
_SWEEP_TICKS = 5  # of uvicorn's, which are 0.1 s
# Descriptors that are not for connections: files, fetches, other processes.
_OTHER_FILES = 512


class HttpServer(uvicorn.Server):
    """Serves an application until `should_exit`, without touching signals.

    backlog: connections that wait in the kernel to be accepted. started: called when connections are taken.
    """

    def __init__(self, app: Any, settings: ServerSettings, *, backlog: int, started: Callable[[], None]) -> None:
        for name in ("uvicorn", "uvicorn.error"):
            logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
        config = uvicorn.Config(
            app,
            interface="asgi3",
            http=partial(GuardedProtocol, server=self),  # type: ignore[arg-type]  # called as a class would be
            ws="none",
            log_config=None,
            access_log=False,  # the frontend's own has durations and request ids
            lifespan="off",
            backlog=_AT_A_TIME,
            timeout_keep_alive=settings.keep_alive_timeout_s,  # type: ignore[arg-type]  # call_later takes it
            server_header=False,
            forwarded_allow_ips=settings.forwarded_allow_ips,
        )
        super().__init__(config)
        limits = ConnectionLimits(
            most=_most_connections(settings.max_connections),
            header_timeout_s=settings.header_timeout_s,
            send_timeout_s=settings.send_timeout_s,
        )
        self.guard = Connections(limits, self.server_state.connections)  # type: ignore[arg-type]  # all are guarded
        self.refuse = _Refusal(settings.max_connections, limits.most)
        self._backlog = backlog
        self._started = started
        self._quiet = OnceInAWhile()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the launcher: uvicorn would raise them again before anything is cleaned up."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to take connections."""
        # What strangers send makes lines of these two: "Invalid HTTP request", and failures to accept.
        for name in ("uvicorn.error", "asyncio"):
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
            for name in ("uvicorn.error", "asyncio"):
                logging.getLogger(name).removeFilter(self._quiet)

    async def on_tick(self, counter: int) -> bool:
        """Take uvicorn's turn, every 0.1 s."""
        if counter % _SWEEP_TICKS == 0:
            self.guard.sweep()
        return await super().on_tick(counter)


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
        super().connection_made(transport)
        if not self._guard.admit(self):
            self._end_with(503, self._refuse.message, "too_many_connections")

    def connection_lost(self, exc: Exception | None) -> None:
        """Report that the connection has ended."""
        self._guard.forget(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count the bytes of headers."""
        if self._guard.idle(self):
            self._guard.reads_headers(self)
        if not self._in_body:
            self._header_bytes += len(data)
        super().data_received(data)
        if self._header_bytes > _MAX_HEADER_BYTES and self._guard.waits(self) and not self._in_body:
            self._end_with(431, f"the request's headers are longer than {_MAX_HEADER_BYTES} bytes", "headers_too_large")

    def on_headers_complete(self) -> None:
        """Report the request, or refuse it if the server is crowded."""
        self._guard.works(self)
        self._header_bytes, self._in_body = 0, True
        crowded = self._guard.crowded and self.url.partition(b"?")[0] != b"/health"
        self.app = self._refuse if crowded else self.config.loaded_app
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Note that the whole request is there."""
        self._in_body = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Report that the answer was written."""
        more = bool(self.pipeline)
        super().on_response_complete()
        if not more and not self.transport.is_closing():
            self._guard.idles(self)

    def resume_writing(self) -> None:
        """Report that the client takes the bytes sent to it."""
        self._guard.moves(self)
        super().resume_writing()

    def drop(self) -> None:
        """End the waiting connection. A client that was answered before may just ask again on another one."""
        if self._guard.idle(self):
            self._guard.works(self)  # it is not to be dropped again
            self.transport.close()
        else:
            self._end_with(503, self._refuse.message, "too_many_connections")

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

    def _end_with(self, status: int, message: str, code: str) -> None:
        self._guard.works(self)
        self.transport.write(_answer(status, message, code))
        self.transport.close()


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
        logger.warning("requests are answered 503: %s", self.message)
        body = _body(503, self.message, "too_many_connections")
        headers = [(name.encode(), value.encode()) for name, value in _headers(503, body).items()]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": body})


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


_PHRASES = {408: "Request Timeout", 431: "Request Header Fields Too Large", 503: "Service Unavailable"}


def _body(status: int, message: str, code: str) -> bytes:
    return json.dumps(error_body(status, message, code=code)).encode()


def _headers(status: int, body: bytes) -> dict[str, str]:
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    return headers | ({"retry-after": str(RETRY_AFTER_S)} if status == 503 else {})


def _answer(status: int, message: str, code: str) -> bytes:
    body = _body(status, message, code)
    lines = [f"HTTP/1.1 {status} {_PHRASES[status]}", *(f"{n}: {v}" for n, v in _headers(status, body).items())]
    return "\r\n".join([*lines, "", ""]).encode() + body


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
