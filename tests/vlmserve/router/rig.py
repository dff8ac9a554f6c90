"""A router in a thread, and servers that do as they are told."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from starlette.websockets import WebSocket

from tests.vlmserve.api.fake_engine import WAIT_S, real_server
from tests.vlmserve.server_process import await_that
from vlmserve.api.event_loop import ApiEventLoop
from vlmserve.api.http_server import HttpServer
from vlmserve.api.listening import listen
from vlmserve.router.command import read_settings
from vlmserve.router.launch import route
from vlmserve.router.workers import Workers

CHAT = "/v1/chat/completions"
ANSWER = {"id": "chatcmpl-1", "object": "chat.completion", "choices": []}


class FakeServer:
    """An ASGI application that notes requests and answers as `script` says: status, headers, parts of the body.

    A part may be a function, which is called in its place; None breaks the connection. health: status and body of
    /health, which waits for `hangs`. talk: works with WebSockets.
    """

    def __init__(self, name: str, model: str = "tiny") -> None:
        self.name = name
        self.model = model
        self.url = ""
        self.health = (200, {"status": "ok"})
        self.hangs: threading.Event | None = None
        self.running = 0
        self.seen: list[tuple[str, str, dict[str, str], bytes]] = []
        self.left = threading.Event()
        self.things: set[str] = set()
        self.talk: Callable[[WebSocket], Awaitable[None]] = WebSocket.close
        self.script: Callable[[str, dict[str, str]], tuple[int, dict[str, str], list[Any]]] = lambda path, headers: (
            *(200, {"content-type": "application/json"}),
            [json.dumps({**ANSWER, "model": self.name}).encode()],
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            return await self.talk(WebSocket(scope, receive, send))
        path, body, more = scope["path"], b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        if path == "/health":
            if self.hangs is not None:
                await asyncio.to_thread(self.hangs.wait, WAIT_S)
            return await self._json(send, *self.health)
        if path == "/metrics":
            text = (
                f'# TYPE vlmserve:num_requests_running gauge\nvlmserve:num_requests_running{{m="x"}} {self.running}\n'
            )
            return await self._send(send, 200, {}, [text.encode()])
        if path == "/v1/models":
            return await self._json(send, 200, {"object": "list", "data": [{"id": self.model}]})
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        if scope["method"] == "GET" and path.startswith(
            ("/v1/files/", "/v1/batches/", "/v1/responses/", "/v1/sessions/")
        ):
            there = path.removeprefix("/v1/") in self.things
            return await self._json(send, 200 if there else 404, {"at": self.name})
        self.seen.append((scope["method"], path, headers, body))
        status, fields, parts = self.script(path, headers)
        return await self._send(send, status, fields, parts, receive)

    async def _json(self, send: Any, status: int, body: object) -> None:
        await self._send(send, status, {"content-type": "application/json"}, [json.dumps(body).encode()])

    async def _send(
        self, send: Any, status: int, fields: dict[str, str], parts: list[Any], receive: Any = None
    ) -> None:
        begun = False
        for part in parts:
            if callable(part):
                waiting = asyncio.ensure_future(asyncio.to_thread(part))
                leaving = asyncio.ensure_future(receive())
                await asyncio.wait((waiting, leaving), return_when=asyncio.FIRST_COMPLETED)
                if leaving.done():
                    self.left.set()
                leaving.cancel()
                await waiting
                continue
            if not begun:
                headers = [(name.encode(), value.encode()) for name, value in fields.items()]
                await send({"type": "http.response.start", "status": status, "headers": headers})
                begun = True
            if part is None:
                return  # without the end: uvicorn breaks the connection
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


@contextlib.contextmanager
def fake_servers(count: int) -> Iterator[list[FakeServer]]:
    with contextlib.ExitStack() as stack:
        servers = [FakeServer("abcdef"[number]) for number in range(count)]
        for server in servers:
            server.url = f"http://127.0.0.1:{stack.enter_context(real_server(server))}"
        yield servers


class Router:
    """A running router. Its workers are to be looked at only."""

    def __init__(self, port: int, workers: Workers) -> None:
        self.port = port
        self.workers = workers

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        with contextlib.closing(link):
            data = json.dumps(body) if isinstance(body, dict) else body
            link.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
            answer = link.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()

    def chat(self, text: str = "hi", **fields: Any) -> tuple[int, Any]:
        """The status and the JSON of an answer."""
        status, _, body = self.ask("POST", CHAT, {"messages": [{"role": "user", "content": text}], **fields})
        return status, json.loads(body)

    def states(self) -> dict[str, str]:
        body = json.loads(self.ask("GET", "/workers")[2])
        return {worker["url"]: worker["state"] for worker in body["workers"]}


@contextlib.contextmanager
def routing(*words: str) -> Iterator[Router]:
    """Run a router with the flags of a command line; in the end nothing is in flight."""
    settings = read_settings([*words, "--port", "0", "--health-check-interval-s", "0.05", "--connect-timeout-s", "2"])
    listener = listen(settings.http.host, settings.http.port)
    ready, made = threading.Event(), []

    def started(server: HttpServer, workers: Workers) -> None:
        made.extend((server, workers, asyncio.get_running_loop()))
        ready.set()

    def run() -> None:
        with asyncio.Runner(loop_factory=ApiEventLoop) as runner:
            runner.run(route(settings, listener, started))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(WAIT_S)
        yield Router(listener.getsockname()[1], made[1])
        await_that(lambda: not any(worker.in_flight for worker in made[1]), WAIT_S)
        assert not any(made[1].load_of(worker) for worker in made[1])
    finally:
        made[0].should_exit = True
        thread.join(WAIT_S)
        listener.close()
        assert not thread.is_alive()
