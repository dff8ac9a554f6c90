"""Clients that send much of what costs the server more than them: no turn of the event loop is long, and others are
answered meanwhile. The turns are measured in CPU time, since other programs share the machine."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.vlmserve.api.fake_engine import BODY, CHAT, MODEL, WAIT_S, Served, serving
from vlmserve.api.event_loop import ApiEventLoop, TurnSelector
from vlmserve.api.http_server import HttpServer
from vlmserve.config.engine_args import EngineArgs
from vlmserve.config.settings import ServerSettings

LONGEST_TURN_S = 0.2


@dataclass
class Attacked:
    """A server, and the turns of its loop."""

    served: Served
    port: int
    turns: TurnSelector

    def connect(self, data: bytes) -> socket.socket:
        link = socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S)
        link.sendall(data)
        return link

    def ask(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(f"http://127.0.0.1:{self.port}{path}", content=json.dumps(body).encode(), timeout=WAIT_S)


@pytest.fixture
def attacked(checkpoint_folder: Path) -> Iterator[Attacked]:
    started = threading.Event()
    loops: list[ApiEventLoop] = []

    def make_loop() -> ApiEventLoop:
        loops.append(ApiEventLoop(time.thread_time))
        return loops[0]

    settings = ServerSettings(engine=EngineArgs(model=""), keep_alive_timeout_s=1000)
    with serving(checkpoint_folder, {"max_queued_requests": 2000}) as served, socket.create_server(("", 0)) as listener:
        server = HttpServer(served.app, settings, backlog=2000, started=started.set)

        def run() -> None:
            with asyncio.Runner(loop_factory=make_loop) as runner:
                runner.run(server.serve([listener]))

        thread = threading.Thread(target=run)
        gc.freeze()  # as the launcher does: a search through all tests' objects is a long turn
        thread.start()
        try:
            assert started.wait(WAIT_S)
            yield Attacked(served, listener.getsockname()[1], loops[0].turns)
        finally:
            server.should_exit = server.force_exit = True
            thread.join(WAIT_S)
            assert not thread.is_alive()
            gc.unfreeze()


def post(path: str, body: bytes) -> bytes:
    return b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (path.encode(), len(body), body)


def leave(server: Attacked) -> None:
    """Hundreds of clients leave at once, within their answers."""
    body = json.dumps(BODY | {"stream": True, "max_tokens": 200}).encode()
    for link in [server.connect(post(CHAT, body)) for _ in range(300)]:
        link.close()


def leave_within_bodies(server: Attacked) -> None:
    for _ in range(3):
        for link in [server.connect(post(CHAT, b"x" * 100_000)[:2000]) for _ in range(100)]:
            link.close()


def send_small_chunks(server: Attacked) -> None:
    head = b"POST %s HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n" % CHAT.encode()
    links = [server.connect(head) for _ in range(4)]
    for _ in range(5):
        for link in links:
            link.sendall(b"1\r\nx\r\n" * 40_000)
    for link in links:
        link.close()


def ask_without_waiting(server: Attacked) -> None:
    for _ in range(8):
        with contextlib.suppress(OSError):  # it ends the connection
            server.connect(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 8000).close()


def send_unknown_fields(server: Attacked) -> None:
    assert server.ask(CHAT, BODY | {f"k{number}": 0 for number in range(150_000)}).status_code == 400


def send_wrong_values(server: Attacked) -> None:
    assert server.ask(CHAT, BODY | {"stop_token_ids": ["a"] * 150_000}).status_code == 400
    assert server.ask(CHAT, BODY | {"logit_bias": {str(number): 1 for number in range(150_000)}}).status_code == 400


def send_endless_texts(server: Attacked) -> None:
    text = "What do you see? " * 1_000_000
    assert server.ask(CHAT, BODY | {"messages": [{"role": "user", "content": text}]}).status_code == 400
    assert server.ask("/tokenize", {"model": MODEL, "prompt": text}).status_code == 400


ATTACKS = (
    *(leave, leave_within_bodies, send_small_chunks, ask_without_waiting),
    *(send_unknown_fields, send_wrong_values, send_endless_texts),
)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_others_are_answered(attacked: Attacked, attack: Callable[[Attacked], None]) -> None:
    thread = threading.Thread(target=attack, args=(attacked,))
    attacked.ask(CHAT, BODY)
    thread.start()
    while thread.is_alive():
        assert attacked.ask(CHAT, BODY).status_code == 200
    thread.join()
    assert attacked.ask(CHAT, BODY).status_code == 200
    assert attacked.turns.longest_s < LONGEST_TURN_S
