"""The served model, as all of its endpoints see it, and work that ends when its client goes away.

Starlette notices in `send` that a client has gone. A request that sends nothing for a while would run on. So everything
long runs beside a task that waits for the disconnect.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from vlmserve.api.errors import describe
from vlmserve.api.file_store import FileStore
from vlmserve.config.plain_problems import shortened
from vlmserve.config.settings import ServerSettings
from vlmserve.frontend.adapters import AdapterRegistry, NamedAdapter
from vlmserve.frontend.openai.answers import AnswerWriter
from vlmserve.frontend.openai.completion_answers import CompletionWriter
from vlmserve.frontend.openai.json_bodies import sse_event
from vlmserve.frontend.openai.protocol import NamedRequest
from vlmserve.frontend.parsers.answer import AnswerFormats
from vlmserve.frontend.requests import GenerateReqInput
from vlmserve.frontend.tasks import Task
from vlmserve.frontend.tokenizer_manager import TokenizerManager
from vlmserve_common.errors import BadRequestError
from vlmserve_common.process.threads import Threads

_T = TypeVar("_T")
DONE = b"data: [DONE]\n\n"


def parsed_events(events: bytes) -> list[dict[str, Any]]:
    """Return the JSON of events of `ServedModel.events`."""
    return [json.loads(one.removeprefix(b"data: ")) for one in events.split(b"\n\n") if one and one != DONE.strip()]


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
    """The served model. name: its name for clients. adapters: those that requests may name in its place. files: the
    uploaded files that requests may name. formats: how it writes calls and thoughts. threads: convert large requests,
    and write large answers."""

    name: str
    adapters: AdapterRegistry
    manager: TokenizerManager
    files: FileStore
    settings: ServerSettings
    formats: AnswerFormats
    threads: Threads

    @property
    def task(self) -> Task:
        """What the model is served for."""
        return self.manager.builder.limits.task

    def check_name(self, name: str | None) -> None:
        """Raise BadRequestError (404) for a model that is not served here. A request without a name means this one."""
        self.adapter_of(name)

    def adapter_of(self, name: str | None, lora_path: str | None = None) -> NamedAdapter | None:
        """Return the adapter that a request names as its model, or besides it; None if it names none. Raises
        BadRequestError for unknown names (404), and for two adapters."""
        named: NamedAdapter | None = None
        for param, given in (("model", name), ("lora_path", lora_path)):
            if not given or (param == "model" and given == self.name):
                continue
            found = self.adapters.find(given)
            if found is not None:
                if named is not None and found is not named:
                    raise BadRequestError(
                        f"lora_path is {found.name!r}, and model {named.name!r}: name one", param=param
                    )
                named = found
                continue
            names = ", ".join([self.name, *(one.name for one in self.adapters.all())][param == "lora_path" :])
            only = f", only {shortened(names)}" if names else ""
            what = f"there is no {'model' if param == 'model' else 'adapter'} {shortened(given)!r} here{only}"
            raise BadRequestError(what, param=param, code="model_not_found", status=404)
        return named

    def adapted(self, body: NamedRequest, requests: Sequence[GenerateReqInput]) -> list[GenerateReqInput]:
        """Return requests with the adapter that their body names. Raises BadRequestError (404)."""
        found = self.adapter_of(getattr(body, "model", None), body.lora_path)
        if found is None:
            return list(requests)
        return [replace(one, adapter=found.ref, warnings=(*one.warnings, *found.warnings)) for one in requests]

    def name_for(self, body: NamedRequest) -> str:
        """Return the name of what answers a body's request."""
        found = self.adapter_of(getattr(body, "model", None), body.lora_path)
        return self.name if found is None else found.name

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
