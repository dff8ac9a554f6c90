"""Clients that hold connections without using them, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import select
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.vlmserve.api.fake_engine import WAIT_S
from vlmserve.api import http_server
from vlmserve.api.http_server import SPARE, Connections, HttpServer
from vlmserve.config.engine_args import EngineArgs
from vlmserve.config.settings import ServerSettings

LARGE = 64 * 2**20  # more than all buffers on the way
GET = b"GET /small HTTP/1.1\r\nHost: localhost\r\n"


class App:
    """/hang is not answered until `release`; /large is large; /read reads its body, whose pieces have these lengths;
    all others answer "ok" without reading a body."""

    def __init__(self) -> None:
        self.release = asyncio.Event()
        self.hanging = threading.Semaphore(0)
        self.pieces: list[int] = []
        self.calls = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.calls += 1
        if scope["path"] == "/read":
            message = {"more_body": True}
            while message.get("more_body"):
                message = await receive()
                self.pieces.append(len(message.get("body", b"")))
        if scope["path"] == "/hang":
            self.loop = asyncio.get_running_loop()
            self.hanging.release()
            await self.release.wait()
        parts = [bytes(2**20)] * (LARGE // 2**20) if scope["path"] == "/large" else [b"ok"]
        headers = [(b"content-length", str(sum(map(len, parts))).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for left, part in enumerate(parts, 1 - len(parts)):
            await send({"type": "http.response.body", "body": part, "more_body": left < 0})


@contextlib.contextmanager
def serving(**settings: Any) -> Iterator[tuple[int, App]]:
    """A server with these settings; those not given wait for longer than a test does."""
    patient = {"header_timeout_s": 1000, "keep_alive_timeout_s": 1000, "send_timeout_s": 1000}
    started, app = threading.Event(), App()
    given = ServerSettings(engine=EngineArgs(model=""), **{**patient, **settings})
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        server = HttpServer(app, given, backlog=100, started=started.set)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        try:
            assert started.wait(WAIT_S)
            yield port, app
        finally:
            server.should_exit = server.force_exit = True
            thread.join(WAIT_S)
            assert not thread.is_alive()


def connect(port: int, data: bytes = b"") -> socket.socket:
    link = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
    link.sendall(data)
    return link


def rest(link: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    with link:
        return b"".join(iter(lambda: link.recv(65536), b""))


def read_answer(link: socket.socket) -> None:
    """The app's short one, which may come in pieces."""
    answer = b""
    while not answer.endswith(b"ok"):
        answer += link.recv(65536)


def get(port: int, path: str) -> tuple[int, bytes]:
    reply = httpx.get(f"http://127.0.0.1:{port}{path}", timeout=WAIT_S)
    return reply.status_code, reply.content


def test_headers_and_the_rest_of_a_body_that_was_not_wanted_have_their_time() -> None:
    """A silent connection is closed without a word. A byte now and then does not buy time, also within a second
    request, whose first byte ends the time that the connection may idle."""
    with serving(header_timeout_s=0.2) as (port, _):
        assert rest(connect(port)) == b""
        answer = rest(connect(port, GET))
        assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert b"--header-timeout-s" in answer
        link = connect(port, GET + b"Content-Length: 1000000\r\n\r\nx")
        read_answer(link)
        link.sendall(b"x")
        assert rest(link) == b""
        link = connect(port, GET + b"\r\n")
        read_answer(link)
        link.settimeout(0.05)
        answer = b""
        for byte in b"GET /small HTTP/1.1\r\nx: " + b"x" * 300:
            link.sendall(bytes([byte]))
            with contextlib.suppress(TimeoutError):
                answer = link.recv(65536)
                break
        assert answer.startswith(b"HTTP/1.1 408 ")
        link.close()


def test_an_idle_connection_is_closed() -> None:
    with serving(keep_alive_timeout_s=0.1) as (port, _):
        assert rest(connect(port, GET + b"\r\n")).endswith(b"ok")


def test_headers_have_a_size() -> None:
    with serving() as (port, _):
        link = connect(port, GET + b"x: " + b"x" * 70_000)
        answer = rest(link)
        assert answer.startswith(b"HTTP/1.1 431 ")
        assert b"65536" in answer


def test_what_comes_in_one_piece_is_not_all_headers() -> None:
    with serving() as (port, _):
        link = connect(
            port, GET + b"Content-Length: 100000\r\n\r\n" + bytes(100_000) + GET + b"Connection: close\r\n\r\n"
        )
        assert rest(link).count(b"200 OK") == 2


READ = b"POST /read HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"


def test_a_turn_takes_few_chunks_and_much_of_a_large_body() -> None:
    """The parser calls back for each chunk. Four connections with chunks of a byte took 0.2 s in each turn of the
    loop."""
    with serving() as (port, app):
        link = connect(port, READ + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 200_000 + b"0\r\n\r\n")
        assert rest(link).endswith(b"ok")
        assert sum(app.pieces) == 200_000
        assert max(app.pieces) < 5_000
        app.pieces.clear()
        link = connect(port, READ + b"Content-Length: 8000000\r\n\r\n" + bytes(8_000_000))
        assert rest(link).endswith(b"ok")
        assert sum(app.pieces) == 8_000_000
        assert max(app.pieces) > 30_000


def test_thousands_of_requests_behind_each_other_are_not_taken() -> None:
    with serving() as (port, app):
        answer = rest(connect(port, (GET + b"\r\n") * 150))
        assert b"more than 100 requests were sent without waiting for an answer" in answer
        assert app.calls <= 101
        few = (GET + b"\r\n") * 50 + GET + b"Connection: close\r\n\r\n"
        assert rest(connect(port, few)).count(b"200 OK") == 51


def test_two_hosts_are_none() -> None:
    """What is in front of the server may have looked at the other one."""
    with serving() as (port, app):
        answer = rest(connect(port, GET + b"host: other\r\n\r\n"))
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_host"
        assert app.calls == 0


def test_a_client_that_does_not_read_is_cut() -> None:
    with serving(send_timeout_s=0.3) as (port, _):
        link = connect(port, b"GET /large HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        watch = select.poll()
        watch.register(link, 0)  # for errors only: nothing is read
        assert watch.poll(1000 * WAIT_S)
        link.close()


class FakeConnection:
    def __init__(self, house: House) -> None:
        self.house = house
        self.ended: list[str] = []
        self.stuck = False

    def end(self, how: str) -> None:
        self.ended.append(how)
        self.house.open.discard(self)
        self.house.guard.forget(self)

    def drop(self) -> None:
        self.end("drop")

    def give_up(self) -> None:
        self.end("give up")

    def cut(self) -> None:
        self.end("cut")


class House:
    """Connections on a clock of the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.open: set[FakeConnection] = set()
        settings = ServerSettings(engine=EngineArgs(model=""), header_timeout_s=10, send_timeout_s=60)
        monkeypatch.setattr(http_server, "time", SimpleNamespace(monotonic=lambda: self.now))
        self.guard = Connections(2, settings, self.open)

    def connect(self) -> FakeConnection:
        new = FakeConnection(self)
        self.open.add(new)
        assert self.guard.admit(new)
        return new


def test_headers_have_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House(monkeypatch)
    silent, worker, idle = (house.connect() for _ in range(3))
    house.guard.works(worker)
    house.guard.works(idle)
    house.guard.idles(idle)
    house.now = 9.9
    house.guard.sweep()
    assert silent.ended == []
    house.now = 10
    house.guard.reads_headers(idle)
    house.guard.sweep()
    assert (silent.ended, worker.ended, idle.ended) == (["give up"], [], [])
    house.now = 20
    house.guard.sweep()
    assert (worker.ended, idle.ended) == ([], ["give up"])


def test_who_does_not_read_is_cut_and_who_reads_slowly_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House(monkeypatch)
    stuck, slow = (house.connect() for _ in range(2))
    for each in (stuck, slow):
        house.guard.works(each)
        each.stuck = True
    for house.now in (0, 30, 59):
        house.guard.sweep()
    house.guard.stuck.pop(slow)  # as `GuardedProtocol.resume_writing` does
    house.now = 60
    house.guard.sweep()
    assert (stuck.ended, slow.ended) == (["cut"], [])
    house.now = 120
    house.guard.sweep()
    assert slow.ended == ["cut"]


def test_health_is_answered_when_all_connections_work() -> None:
    with serving(max_connections=3) as (port, app):
        working = [connect(port, b"GET /hang HTTP/1.1\r\nHost: localhost\r\n\r\n") for _ in range(3)]
        for _ in working:
            assert app.hanging.acquire(timeout=WAIT_S)
        assert get(port, "/health") == (200, b"ok")
        status, body = get(port, "/small")
        assert status == 503
        assert json.loads(body)["error"]["code"] == "too_many_connections"
        assert b"limit is 3 (setting --max-connections)" in body
        for link in working:
            link.close()


def test_silent_connections_make_room() -> None:
    with serving(max_connections=3) as (port, _):
        silent = [connect(port) for _ in range(2 * SPARE)]
        assert get(port, "/small") == (200, b"ok")
        assert rest(silent[0]).startswith(b"HTTP/1.1 503 "), "it has waited longest, and is told why it ends"
        for link in silent:
            link.close()


def test_connections_that_were_answered_make_room_without_a_word() -> None:
    """Who keeps them asks again on another, and would take a word for the answer."""
    with serving(max_connections=3) as (port, _):
        kept = connect(port, GET + b"\r\n")
        read_answer(kept)
        silent = [connect(port) for _ in range(2 * SPARE)]
        assert rest(kept) == b""
        for link in silent:
            link.close()


def test_what_strangers_do_makes_one_line(caplog: pytest.LogCaptureFixture) -> None:
    logs = [logging.getLogger(name) for name in ("uvicorn.error", "vlmserve.api.http_server")]
    for log in logs:
        log.addHandler(caplog.handler)  # it need not come to the root's, after other servers
    with serving(max_connections=3) as (port, app):
        for _ in range(20):
            answer = rest(connect(port, b"\x16\x03\x01 this is no HTTP\r\n\r\n"))
            assert answer.startswith(b"HTTP/1.1 400 ")
            assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"
        working = [connect(port, b"GET /hang HTTP/1.1\r\nHost: localhost\r\n\r\n") for _ in range(3 + SPARE)]
        for _ in range(3):
            assert app.hanging.acquire(timeout=WAIT_S)
        for _ in range(20):
            assert get(port, "/small")[0] == 503
        for link in working:
            link.close()
    for log in logs:
        log.removeHandler(caplog.handler)
    for told in ("Invalid HTTP request", "clients are answered 503: more than 3 connections are open"):
        assert len({id(record) for record in caplog.records if told in record.getMessage()}) == 1


def test_half_closed_is_gone() -> None:
    """Nobody can tell a client that only stopped sending from one that has left, whose work must not go on."""
    with serving() as (port, app):
        link = connect(port, b"GET /hang HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert app.hanging.acquire(timeout=WAIT_S)
        link.shutdown(socket.SHUT_WR)
        assert rest(link) == b""
        assert get(port, "/small") == (200, b"ok")
