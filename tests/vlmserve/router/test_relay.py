"""WebSockets through the router: messages both ways, both ends, back-pressure, and servers that are not there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading

import pytest
from starlette.responses import JSONResponse
from starlette.websockets import WebSocketDisconnect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from tests.vlmserve.api.fake_engine import WAIT_S
from tests.vlmserve.router.rig import routing
from tests.vlmserve.server_process import await_that

MIB = 2**20


def dial(router, path="/v1/sessions/s1/frames", **headers):
    return connect(
        f"ws://127.0.0.1:{router.port}{path}", additional_headers=headers, compression=None, open_timeout=WAIT_S
    )


def refusal(router, path="/v1/sessions/s1/frames"):
    with pytest.raises(InvalidStatus) as refused:
        dial(router, path)
    answer = refused.value.response
    return answer.status_code, json.loads(answer.body)["error"]


def metrics(router):
    text = router.ask("GET", "/metrics")[2].decode()
    lines = [line.rpartition(" ") for line in text.splitlines() if "router_websocket" in line and line[0] != "#"]
    return {name.partition(":router_")[2]: float(value) for name, _, value in lines if "_created" not in name}


class Seen:
    """What a server's WebSockets got. It reads them while `reads` is set."""

    def __init__(self, server):
        self.got, self.left, self.headers = [], [], {}
        self.reads = threading.Event()
        self.reads.set()
        self.ended = threading.Event()
        server.things = {"sessions/s1"}
        server.talk = self.talk

    async def talk(self, socket):
        self.headers = dict(socket.headers)
        await socket.accept()
        try:
            while True:
                while not self.reads.is_set():
                    await asyncio.sleep(0.01)
                message = await socket.receive()
                if message["type"] == "websocket.disconnect":
                    raise WebSocketDisconnect(message["code"])
                self.got.append(message.get("bytes") or message.get("text"))
                if message.get("text") == "end":
                    await socket.send_text("bye")
                    await socket.close(4001, "done")
                    return
                with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # the client may have left
                    await socket.send_text(str(len(self.got)))
        except WebSocketDisconnect as left:
            self.left.append(left.code)
        finally:
            self.ended.set()


@pytest.fixture
def seen(servers):
    return Seen(servers[1])


def test_messages_go_to_the_server_of_the_session_and_back(router, servers, seen):
    with dial(router, Authorization="Bearer x") as socket:
        for number, message in enumerate((b"\x01" * 300_000, "flush", b"2")):
            socket.send(message)
            assert socket.recv(WAIT_S) == str(number + 1)
        url = servers[1].url
        assert metrics(router) == {
            f'websockets_open{{server="{url}"}}': 1,
            f'websocket_messages_total{{direction="to_server",server="{url}"}}': 3,
            f'websocket_messages_total{{direction="to_client",server="{url}"}}': 3,
        }
        socket.send("end")
        assert socket.recv(WAIT_S) == "bye"
        with pytest.raises(ConnectionClosed):
            socket.recv(WAIT_S)
    assert (socket.close_code, socket.close_reason) == (4001, "done")
    await_that(lambda: metrics(router)[f'websockets_open{{server="{url}"}}'] == 0, WAIT_S)
    assert [type(one) for one in seen.got] == [bytes, str, bytes, str]
    assert seen.headers["authorization"] == "Bearer x"
    assert seen.headers["x-forwarded-for"] == "127.0.0.1"
    assert seen.headers["x-request-id"]


def test_what_came_before_a_client_left_still_arrives(router, seen):
    seen.reads.clear()
    with dial(router) as socket:
        for number in range(200):
            socket.send(b"%d" % number)
        socket.close(4002)
    seen.reads.set()
    assert seen.ended.wait(WAIT_S)
    assert seen.got == [b"%d" % number for number in range(200)]
    assert seen.left == [4002]


def test_a_server_without_room_holds_up_its_client(router, seen):
    seen.reads.clear()
    sent = []

    def send(socket):
        for number in range(64):
            socket.send(bytes([number]) * MIB)
            sent.append(number)

    with dial(router) as socket:
        sending = threading.Thread(target=send, args=(socket,))
        sending.start()
        count = -1
        while count != len(sent):  # until no more goes
            count = len(sent)
            sending.join(0.5)
        assert sending.is_alive()
        assert count < 40, "all sides hold a few MiB"
        seen.reads.set()
        for number in range(64):
            assert socket.recv(WAIT_S) == str(number + 1)
        sending.join(WAIT_S)
    assert [one[0] for one in seen.got] == list(range(64))


def test_messages_on_their_way_have_a_limit_together(servers, seen):
    seen.reads.clear()
    with routing("--replica", servers[1].url, "--max-body-mib", "1", "--max-bodies-mib", "1") as router:
        with contextlib.ExitStack() as stack:
            sockets = [stack.enter_context(dial(router)) for _ in range(2)]
            sending = []
            for socket in sockets:

                def send(socket=socket):
                    with contextlib.suppress(ConnectionClosed):
                        for _ in range(64):
                            socket.send(bytes(800_000))

                sending.append(threading.Thread(target=send))
                sending[-1].start()
            await_that(lambda: any(not one.is_alive() for one in sending))
            seen.reads.set()
            said = []
            for socket in sockets:
                with contextlib.suppress(ConnectionClosed, TimeoutError):
                    while not (text := socket.recv(WAIT_S)).startswith("{"):
                        if text == "64":
                            break
                said.append(text)
            for one in sending:
                one.join(WAIT_S)
        full = [json.loads(text) for text in said if text.startswith("{")]
        assert [one["error"]["code"] for one in full] == ["bodies_too_large_together"] * len(full)
        assert full
        assert 1013 in [socket.close_code for socket in sockets]


def test_a_server_that_is_lost(router, servers, seen):
    async def break_off(socket):
        await socket.accept()
        await socket.receive()
        raise ConnectionError("so that the connection ends without a word")

    servers[1].talk = break_off
    with dial(router) as socket:
        socket.send("x")
        error = json.loads(socket.recv(WAIT_S))
        with pytest.raises(ConnectionClosed):
            socket.recv(WAIT_S)
    assert (error["type"], error["error"]["code"]) == ("error", "server_lost")
    assert socket.close_code == 1011
    failures = router.ask("GET", "/metrics")[2].decode()
    assert f'failures_total{{reason="broken",server="{servers[1].url}"}} 1.0' in failures


def test_a_server_that_hangs_is_cut_off(servers, seen):
    limits = ("--health-check-timeout-s", "0.2", "--health-failure-threshold", "1")
    with routing("--replica", servers[1].url, *limits) as router, dial(router) as socket:
        servers[1].hangs = threading.Event()
        try:
            assert json.loads(socket.recv(WAIT_S))["error"]["code"] == "server_lost"
        finally:
            servers[1].hangs.set()


def test_refusals(router, servers, seen):
    status, error = refusal(router, "/v1/sessions/none/frames")
    assert (status, error["code"]) == (404, "session_not_found")
    assert "'none'" in error["message"]
    assert refusal(router, "/v1/realtime")[0] == 404

    async def busy(socket):
        await socket.send_denial_response(JSONResponse({"error": {"code": "busy"}}, 409))

    servers[1].talk = busy
    assert refusal(router) == (409, {"code": "busy"})
    for server in servers:
        server.health = (503, {})
    await_that(lambda: set(router.states().values()) == {"unhealthy"}, WAIT_S)
    status, error = refusal(router)
    assert (status, error["code"]) == (503, "no_server")
    assert servers[1].url in error["message"]


def test_a_server_that_is_to_go_waits_for_its_websockets(router, servers, seen):
    with dial(router) as socket:
        socket.send("1")
        assert socket.recv(WAIT_S) == "1"
        url = servers[1].url
        assert router.ask("DELETE", f"/workers/{url}")[0] == 202
        socket.send("2")
        assert socket.recv(WAIT_S) == "2"
        assert router.states()[url] == "draining"
    await_that(lambda: url not in router.states(), WAIT_S)


def test_a_key_is_needed(servers, seen, tmp_path):
    with routing("--replica", servers[1].url, "--api-key", "secret") as router:
        status, error = refusal(router)
        assert (status, error["code"]) == (401, "invalid_api_key")
        with dial(router, Authorization="Bearer secret") as socket:
            socket.send("1")
            assert socket.recv(WAIT_S) == "1"
