"""A server of OpenAI's API that tests control, captioners that ask it, and time that tests control."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from vlmserve.commands.batch.item import ChatRequest
from vlmserve.commands.caption.remote import RemoteCaptioner
from vlmserve.commands.caption.run import Captioner


@dataclass(frozen=True, kw_only=True)
class Reply:
    """body: JSON, unless it is bytes. cut: the connection breaks when so many bytes of the body have gone."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None


Handler = Callable[[dict[str, Any]], Awaitable[Reply]]


def completion(text: Any, **fields: Any) -> Reply:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    return Reply(body={"object": "chat.completion", "choices": [choice], "usage": usage, **fields})


def text_of(body: dict[str, Any]) -> str:
    return body["messages"][-1]["content"]


async def echo(body: dict[str, Any]) -> Reply:
    return completion("says " + text_of(body))


def always(reply: Reply) -> Handler:
    """The same reply to all requests."""

    async def answer(_: dict[str, Any]) -> Reply:
        return reply

    return answer


class Held:
    """Echoes once `release` is set. at_work: set by the first request."""

    def __init__(self) -> None:
        self.at_work, self.release = asyncio.Event(), asyncio.Event()

    async def __call__(self, body: dict[str, Any]) -> Reply:
        self.at_work.set()
        await self.release.wait()
        return await echo(body)


class StubServer:
    """An async context manager. asked: bodies of chat requests; requests: first lines of all; headers: of all."""

    def __init__(self, handle: Handler = echo, models: Sequence[str] = ("m",)) -> None:
        self.handle = handle
        self.models: Reply = Reply(body={"data": [{"id": name} for name in models]})
        self.asked: list[dict[str, Any]] = []
        self.requests: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.hung_up = asyncio.Event()
        self._port = 0
        self._server: asyncio.Server | None = None
        self._tasks: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def die(self) -> None:
        """Connections break, also those on which an answer is under way; new ones are refused."""
        assert self._server is not None
        self._server.close()
        tasks = list(self._tasks)
        for task, writer in self._tasks.items():
            writer.transport.abort()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def __aenter__(self) -> StubServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks[task] = writer
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
                while await self._exchange(reader, writer):
                    pass
        finally:
            del self._tasks[task]
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        content = await reader.readexactly(int(headers.get("content-length", 0)))
        self.requests.append(first)
        self.headers.append(headers)
        reply = self.models
        if first.startswith("POST"):
            self.asked.append(json.loads(content))
            answering = asyncio.ensure_future(self.handle(self.asked[-1]))
            hanging_up = asyncio.ensure_future(reader.read(1))
            try:
                await asyncio.wait((answering, hanging_up), return_when=asyncio.FIRST_COMPLETED)
                if not answering.done():
                    self.hung_up.set()
                    return False
                reply = answering.result()
            finally:
                answering.cancel()
                hanging_up.cancel()
                await asyncio.gather(answering, hanging_up, return_exceptions=True)
        body = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        head = {"Content-Length": str(len(body)), **reply.headers}
        writer.write(f"HTTP/1.1 {reply.status} Stub\r\n".encode())
        writer.write("".join(f"{name}: {value}\r\n" for name, value in head.items()).encode() + b"\r\n")
        writer.write(body[: reply.cut])
        await writer.drain()
        return reply.cut is None


class ToldTime:
    """Time that passes when it is told to: `sleep` ends by `passes` only. slept: what sleeps were begun."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []
        self._sleepers: list[tuple[float, float, asyncio.Future[None]]] = []
        self._asleep = asyncio.Event()

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        sleeper = (self.now + seconds, seconds, asyncio.get_running_loop().create_future())
        self._sleepers.append(sleeper)
        self._asleep.set()
        try:
            await sleeper[2]
        finally:
            self._sleepers.remove(sleeper)

    def is_awake(self) -> bool:
        """Nobody sleeps."""
        return not self._sleepers

    async def passes(self, seconds: float | None = None) -> None:
        """Whoever sleeps so long wakes up (None: who would be the first), as soon as there is somebody."""
        while True:
            asleep = [one for one in self._sleepers if seconds in (None, one[1]) and not one[2].done()]
            if asleep:
                self.now, _, waking = min(asleep, key=lambda one: one[0])
                waking.set_result(None)
                return
            self._asleep.clear()
            await self._asleep.wait()

    async def passes_until(self, done: asyncio.Future[Any]) -> None:
        """As often as it takes."""
        while not done.done():
            passing = asyncio.ensure_future(self.passes())
            await asyncio.wait((passing, done), return_when=asyncio.FIRST_COMPLETED)
            passing.cancel()
            await asyncio.gather(passing, return_exceptions=True)


class FastTime:
    """A thousand times as fast as it should be."""

    def clock(self) -> float:
        return asyncio.get_running_loop().time() * 1000

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 1000)


_WAIT_S = 30.0  # a bound that passing tests never reach


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make a test of a coroutine function."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(_WAIT_S):
                await test(*args, **kwargs)

        asyncio.run(bounded())

    return run


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
