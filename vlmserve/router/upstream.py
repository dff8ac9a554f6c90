"""HTTP/1.1 to a server: connections that are kept, and answers that are read as they come.

A general client takes about a millisecond for a request and a tenth of one for an event. This one has what a router
needs: it passes bytes on, and looks into none.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeAlias
from urllib.parse import urlsplit

import httptools

Headers: TypeAlias = Sequence[tuple[bytes, bytes]]
Body: TypeAlias = bytes | bytearray | AsyncIterator[bytes]
"""A whole body, or one that is sent in chunks as its parts come."""
# Servers close connections that idle for 5 s (--keep-alive-timeout-s). One that is about to be closed is not used.
_KEPT_S = 4.0
_MOST_WAITING = 256 * 1024
# Smaller bodies are sent with the headers.
_COPIED_BYTES = 64 * 1024
_BODILESS = (204, 304)


class ServerLostError(Exception):
    """A server did not answer to the end. reached: some of the request may have arrived there."""

    def __init__(self, message: str, *, reached: bool) -> None:
        super().__init__(message)
        self.reached = reached


class Answer(asyncio.Protocol):
    """A connection, and the answer of the request that it works for. status, headers: there once `begin` returns.

    Call `close` at the end, whatever it is; the connection is kept if the whole answer was read.
    """

    def __init__(self, server: Server) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.idle_since = 0.0
        self.lost = False
        self._server = server
        self._parser = httptools.HttpResponseParser(self)
        self._why = "it closed the connection"
        self._parts: list[bytes] = []
        self._num_waiting = 0
        self._complete = self._is_head = self._to_the_end = self._sent = self._cut_short = self._keeps = False
        self._writable = True
        self._waiter: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport

    # ---- asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None:
            self._why = str(exc) or type(exc).__name__
        self.lost = True
        if self._to_the_end and exc is None:
            self._complete = True
        self._server.forget(self)
        self._wake()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.abort(f"its answer is no HTTP ({error})")
        if self._complete and not self._sent:
            self.abort("it sent more than the answer")
        if self._num_waiting > _MOST_WAITING:
            self._transport.pause_reading()
        self._wake()

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self._wake()

    # ---- the parser's side

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # of an answer that is still to come
            self.headers.clear()
            return
        self.status = status
        names = {name for name, _ in self.headers}
        self._to_the_end = status not in _BODILESS and not names & {b"content-length", b"transfer-encoding"}
        self._complete = self._is_head

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)
        self._num_waiting += len(body)

    def on_message_complete(self) -> None:
        self._complete = self.status > 0
        self._keeps = self._parser.should_keep_alive()  # later the parser has forgotten

    # ---- the router's side

    async def begin(self, method: str, target: bytes, headers: Headers, body: Body) -> None:
        """Send a request, and wait for the status and the headers of its answer. body: the parts of one are sent in
        chunks, until there is an answer. Raises ServerLostError."""
        self.status, self._complete, self._to_the_end, self._sent, self._keeps = 0, False, False, True, False
        self.headers = []  # the former list may still be in use
        self._is_head = method == "HEAD"
        self._parser = httptools.HttpResponseParser(self)
        lines = [method.encode() + b" " + target + b" HTTP/1.1", b"host: " + self._server.netloc]
        lines += [name + b": " + value for name, value in headers]
        if isinstance(body, bytes | bytearray):
            if body or method not in ("GET", "HEAD"):
                lines.append(b"content-length: %d" % len(body))
            head = b"\r\n".join([*lines, b"\r\n"])
            if len(body) < _COPIED_BYTES:
                self._transport.write(head + body)
            else:
                self._transport.write(head)
                self._transport.write(body)
        else:
            self._transport.write(b"\r\n".join([*lines, b"transfer-encoding: chunked\r\n\r\n"]))
            await self._send_parts(body)
        while not self.status:
            await self._news()

    async def _send_parts(self, body: AsyncIterator[bytes]) -> None:
        async for part in body:
            while not self._writable and not self.status:
                await self._news()
            if self.status or self.lost:
                self._cut_short = True  # the rest of the body is not sent: nothing can follow on this connection
                return
            if part:
                self._transport.writelines((b"%x\r\n" % len(part), part, b"\r\n"))
        self._transport.write(b"0\r\n\r\n")

    async def part(self) -> bytes:
        """Return the bytes of the body that have come since the last call, or b"" at its end. Raises
        ServerLostError."""
        while not self._parts:
            if self._complete:
                return b""
            await self._news()
        parts, self._parts = self._parts, []
        if self._num_waiting > _MOST_WAITING:
            self._transport.resume_reading()
        self._num_waiting = 0
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def whole(self) -> bytes:
        """Return the whole body, or the rest of it. Raises ServerLostError."""
        parts = []
        while part := await self.part():
            parts.append(part)
        return b"".join(parts)

    @property
    def is_whole(self) -> bool:
        """Return True if all of the body has come."""
        return self._complete

    def close(self) -> None:
        """Keep the connection for another request if it can serve one, or end it."""
        if self._keeps and self._complete and not (self._parts or self.lost or self._is_head or self._cut_short):
            self._sent = False
            self._server.keep(self)
        else:
            self._transport.abort()

    def abort(self, why: str) -> None:
        """End the connection, and the wait for it. why: completes "the server is lost: ..."."""
        self._why = why
        self.lost = True
        self._transport.abort()
        self._wake()

    async def _news(self) -> None:
        if self.lost:
            raise ServerLostError(self._why, reached=True)
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Server:
    """The connections to one server. url: http://HOST:PORT or https, without a path. connect_timeout_s: for each.

    websockets: the connections of those that are open, for `cut`.
    """

    def __init__(self, url: str, *, connect_timeout_s: float) -> None:
        at = urlsplit(url)
        self.netloc = at.netloc.encode()
        self._ssl = ssl.create_default_context() if at.scheme == "https" else None
        self._host, self._port = at.hostname or "", at.port or (443 if self._ssl else 80)
        self._connect_timeout_s = connect_timeout_s
        self.websockets: set[asyncio.Transport] = set()
        self._open: set[Answer] = set()
        self._idle: list[Answer] = []

    async def ask(
        self,
        method: str,
        target: bytes,
        headers: Headers = (),
        body: Body = b"",
        *,
        repeatable: bool = True,
        begun: Callable[[Answer], None] = lambda _: None,
    ) -> Answer:
        """Send a request, and return its answer, of which status and headers are there. Raises ServerLostError.

        repeatable: the request may arrive twice. The server may close a kept connection just when it is used; such
        requests are then sent once more on a new one, and others get a new one at once. begun: gets the answer as soon
        as there is a connection, so that it can be aborted.
        """
        kept = self._take() if repeatable else None
        if kept is not None:
            with contextlib.suppress(ServerLostError):
                return await _begun(kept, begun, method, target, headers, body)
        return await _begun(await self._connect(), begun, method, target, headers, body)

    async def get(self, path: bytes, headers: Headers = ()) -> tuple[int, bytes]:
        """Return the status and the body of a small answer. Raises ServerLostError."""
        answer = await self.ask("GET", path, headers)
        try:
            return answer.status, await answer.whole()
        finally:
            answer.close()

    def websocket_url(self, target: bytes) -> str:
        """Return the address of a WebSocket. target: path and query."""
        return f"{'ws' if self._ssl is None else 'wss'}://{self.netloc.decode()}{target.decode('latin-1')}"

    def keep(self, answer: Answer) -> None:
        """Keep a connection for the next request."""
        answer.idle_since = time.monotonic()
        self._idle.append(answer)

    def forget(self, answer: Answer) -> None:
        """Forget a connection that was lost."""
        self._open.discard(answer)
        if answer in self._idle:
            self._idle.remove(answer)

    def cut(self, why: str) -> None:
        """End all connections, those of requests under way, too. why: see `Answer.abort`."""
        for answer in list(self._open):
            answer.abort(why)
        for transport in list(self.websockets):
            transport.abort()

    def _take(self) -> Answer | None:
        while self._idle:
            answer = self._idle.pop()  # the one used last: the others may be left to idle
            if time.monotonic() - answer.idle_since < _KEPT_S and not answer.lost:
                return answer
            answer.abort("it was not needed")
        return None

    async def _connect(self) -> Answer:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, answer = await asyncio.get_running_loop().create_connection(
                    lambda: Answer(self), self._host, self._port, ssl=self._ssl
                )
        except TimeoutError:
            raise ServerLostError(
                f"no connection in {self._connect_timeout_s:g} s (--connect-timeout-s)", reached=False
            ) from None
        except OSError as error:
            raise ServerLostError(error.strerror or str(error), reached=False) from None
        self._open.add(answer)
        return answer


async def _begun(
    answer: Answer,
    begun: Callable[[Answer], None],
    method: str,
    target: bytes,
    headers: Headers,
    body: Body,
) -> Answer:
    begun(answer)
    try:
        await answer.begin(method, target, headers, body)
    except BaseException:
        answer.close()
        raise
    return answer
