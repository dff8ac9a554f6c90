"""The served model, as all of its endpoints see it, and work that ends when its client goes away.

Starlette notices in `send` that a client has gone. A request that sends nothing for a while would run on. So everything
long runs beside a task that waits for the disconnect.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vlmserve.api.errors import describe
from vlmserve.api.file_store import FileStore
from vlmserve.config.plain_problems import shortened
from vlmserve.config.settings import ServerSettings
from vlmserve.frontend.openai.answers import AnswerWriter
from vlmserve.frontend.openai.completion_answers import CompletionWriter
from vlmserve.frontend.openai.json_bodies import sse_event
from vlmserve.frontend.parsers.answer import AnswerFormats
from vlmserve.frontend.requests import GenerateReqInput
from vlmserve.frontend.tokenizer_manager import TokenizerManager
from vlmserve_common.errors import BadRequestError
from vlmserve_common.process.threads import Threads

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


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The served model. name: its name for clients. files: the uploaded files that requests may name. formats: how it
    writes calls and thoughts. threads: convert large requests, and write large answers."""

    name: str
    manager: TokenizerManager
    files: FileStore
    settings: ServerSettings
    formats: AnswerFormats
    threads: Threads

    def check_name(self, name: str | None) -> None:
        """Raise BadRequestError (404) for a model that is not served here. A request without a name means this one."""
        if name and name != self.name:
            what = f"there is no model {shortened(name)!r} here, only {self.name}"
            raise BadRequestError(what, param="model", code="model_not_found", status=404)

    async def events(
        self, prepare: Callable[[], tuple[Sequence[GenerateReqInput], AnswerWriter | CompletionWriter]]
    ) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream. prepare: returns the requests, and the writer of their answers.

        An error before the first output is raised, while a status can still be sent. A later error becomes an event, as
        OpenAI's API has it.
        """
        wanted, writer = prepare()
        async with aclosing(self.manager.stream(*wanted)) as batches:
            yield writer.events(await anext(batches))
            try:
                async for items in batches:
                    yield writer.events(items)
                yield writer.usage_event()
            except Exception as error:
                yield sse_event(describe(error)[1])
            yield DONE
