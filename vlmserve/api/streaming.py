"""Work that ends when its client goes away, and server-sent events.

Starlette notices in `send` that a client has gone. A request that sends nothing for a while would run on. So everything
long runs beside a task that waits for the disconnect.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

_T = TypeVar("_T")
DONE = b"data: [DONE]\n\n"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Return the work's result. If the client goes away first, cancel the work and raise ClientDisconnect.

    The request's body must have been read.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


class EventStream(Response):
    """A text/event-stream of ready-made events, of which several may come at once. `events` is closed at the end,
    whatever the end is."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes, None]) -> None:
        self.status_code = 200
        self.background = None
        # Proxies must neither keep events nor collect them (the second header is nginx's).
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._first = first
        self._events = events

    @classmethod
    async def begin(cls, receive: Receive, events: AsyncGenerator[bytes, None]) -> EventStream:
        """Return the stream when its first event is there. Earlier errors are raised: a status can still be sent."""
        try:
            first = await while_connected(receive, anext(events))
        except BaseException:
            await events.aclose()
            raise
        return cls(first, events)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(ClientDisconnect):
                await while_connected(receive, self._write(send))
        finally:
            await self._events.aclose()

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        with contextlib.suppress(OSError):  # the client is gone
            if self._first:
                await send({"type": "http.response.body", "body": self._first, "more_body": True})
            async for events in self._events:
                if events:
                    await send({"type": "http.response.body", "body": events, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
