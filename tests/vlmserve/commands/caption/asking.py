"""Captioners of stub servers, and what they are asked."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from tests.vlmserve.commands.caption.stub_server import FastTime, StubServer, ToldTime
from vlmserve.commands.batch.item import ChatRequest
from vlmserve.commands.caption.captioner import Captioner
from vlmserve.commands.caption.remote import RemoteCaptioner

_WAIT_S = 30.0  # a bound, never waited for when all is well


def run(test: Coroutine[Any, Any, None], wait_s: float = _WAIT_S) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(wait_s):
            await test

    asyncio.run(bounded())


@contextlib.asynccontextmanager
async def captioner(
    *servers: StubServer | str, time: ToldTime | FastTime | None = None, started: bool = True, **settings: Any
) -> AsyncIterator[RemoteCaptioner]:
    time = time or ToldTime()
    urls = [server if isinstance(server, str) else server.url for server in servers]
    defaults = {"api_key": None, "model": None, "request_timeout_s": 20.0, "server_timeout_s": 60.0}
    made = RemoteCaptioner(urls, **{**defaults, **settings}, clock=time.clock, sleep=time.sleep)
    try:
        if started:
            await made.start()
        yield made
        assert [server.outstanding for server in made._servers] == [0] * len(urls)
    finally:
        await made.close()


def chat(text: str, **options: Any) -> ChatRequest:
    return ChatRequest(messages=[{"role": "user", "content": text}], options=options)


def said(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


async def ask(asked: Captioner, text: str = "x") -> str:
    return said(await asked.ask(chat(text)))
