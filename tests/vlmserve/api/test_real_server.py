"""Over real sockets: many streams at once, and clients that leave."""

from __future__ import annotations

import http.client
import json
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.vlmserve.api.fake_engine import CHAT, HI, MODEL, WAIT_S, real_server


def test_many_streams_at_once(ai, served):
    def ask(number: int) -> str:
        messages = [{"role": "user", "content": f"item {number % 8}"}]
        chunks = ai.chat.completions.create(model=MODEL, messages=messages, stream=True, temperature=0, max_tokens=20)
        return "".join(c.choices[0].delta.content or "" for c in chunks)

    alone = [ask(number) for number in range(8)]
    assert len(set(alone)) == 8
    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(ask, range(64))) == alone * 8


def post(port: int, url: str, body: object) -> http.client.HTTPConnection:
    """A connection on which a request was sent."""
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    link.request("POST", url, json.dumps(body), {"Content-Type": "application/json"})
    return link


def start(port: int, **fields) -> http.client.HTTPConnection:
    return post(port, CHAT, {"model": MODEL, "messages": HI, "max_tokens": 200, "temperature": 0, **fields})


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pause_after", [0, 3])
def test_a_client_that_leaves_aborts_its_request(port, served, stream, pause_after, n):
    """Before the first output as well as in the middle, while nothing is being sent to it."""
    served.scheduler.pause_after = pause_after
    link = start(port, stream=stream, n=n)
    served.scheduler.wait_until(lambda: len(served.scheduler.requests) == n)
    if stream and pause_after:
        assert link.getresponse().read(20)
    link.sock.shutdown(socket.SHUT_RDWR)
    link.close()
    served.scheduler.wait_until(lambda: len(served.scheduler.aborts) == n)
    assert {abort.rid for abort in served.scheduler.aborts} == {r.rid for r in served.scheduler.requests}
    assert not any(abort.finished for abort in served.scheduler.aborts)
    served.scheduler.pause_after = None
    assert json.loads(start(port, max_tokens=4).getresponse().read())["usage"]["completion_tokens"] == 4


def test_a_client_that_leaves_while_its_picture_is_fetched(serve):
    """The picture's server accepts and says nothing; nothing ever reaches the scheduler."""
    served, _client = serve(allow_private_media=True)
    with socket.create_server(("127.0.0.1", 0)) as silent, real_server(served.app) as port:
        silent.settimeout(WAIT_S)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/x.png"
        link = start(port, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])
        accepted, _ = silent.accept()
        with accepted:
            assert served.frontend.manager.num_pending == 1
            link.close()
            # The next request on the same loop is answered, and by then the first one has gone.
            answer = start(port, max_tokens=4).getresponse()
            assert answer.status == 200
            answer.read()
            assert json.loads(start(port, max_tokens=4).getresponse().read())["usage"]["completion_tokens"] == 4
            served.assert_idle()
        assert len(served.scheduler.requests) == 2


def test_a_client_that_leaves_within_its_body_harms_nobody(port):
    with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S) as link:
        link.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
    assert start(port, max_tokens=4).getresponse().status == 200
