"""Over real sockets: the official client, and clients that leave."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.vlmserve.api.fake_engine import MODEL, WAIT_S, Served, png_url, real_server

HI = [{"role": "user", "content": "hi"}]


@pytest.fixture
def port(served: Served) -> Iterator[int]:
    with real_server(served.app) as port:
        yield port
    served.assert_idle()


@pytest.fixture
def ai(port: int) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as client:
        yield client


def test_the_official_client(ai, served):
    served.scheduler.say("a red square")
    content = [{"type": "image_url", "image_url": {"url": png_url()}}, {"type": "text", "text": "What is it?"}]
    answer = ai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": content}], logprobs=True)
    assert answer.choices[0].message.content == "a red square"
    assert answer.choices[0].finish_reason == "stop"
    assert "".join(t.token for t in answer.choices[0].logprobs.content) == "a red square"
    assert answer.usage.prompt_tokens_details.cached_tokens == answer.usage.prompt_tokens // 2
    assert [model.id for model in ai.models.list()] == [MODEL]
    assert ai.models.retrieve(MODEL).id == MODEL


def test_the_official_client_streams(ai, served):
    served.scheduler.say("a red square")
    with ai.chat.completions.create(
        model=MODEL, messages=HI, stream=True, stream_options={"include_usage": True}
    ) as chunks:
        seen = list(chunks)
    assert "".join(c.choices[0].delta.content or "" for c in seen if c.choices) == "a red square"
    assert seen[-1].usage.completion_tokens == len(served.scheduler.tokenizer.encode("a red square")) + 1


def test_the_official_client_understands_errors(ai):
    with pytest.raises(openai.BadRequestError) as caught:
        ai.chat.completions.create(model=MODEL, messages=HI, temperature=3)
    assert caught.value.param == "temperature"
    assert caught.value.code == "invalid_value"
    with pytest.raises(openai.NotFoundError):
        ai.chat.completions.create(model="other", messages=HI)
    with pytest.raises(openai.NotFoundError):
        ai.models.retrieve("other/model")


def test_the_official_client_sees_a_stream_break(ai, served):
    def script(request, index):
        if index == 2:
            served.frontend.fail_all("the engine is gone")
        return 65

    served.scheduler.script = script
    with pytest.raises(openai.APIError, match="the engine is gone"):
        list(ai.chat.completions.create(model=MODEL, messages=HI, stream=True))


def test_many_streams_at_once(ai, served):
    def ask(number: int) -> str:
        messages = [{"role": "user", "content": f"item {number % 8}"}]
        chunks = ai.chat.completions.create(model=MODEL, messages=messages, stream=True, temperature=0, max_tokens=20)
        return "".join(c.choices[0].delta.content or "" for c in chunks)

    alone = [ask(number) for number in range(8)]
    assert len(set(alone)) == 8
    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(ask, range(64))) == alone * 8


def start(port: int, **fields) -> http.client.HTTPConnection:
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    body = {"model": MODEL, "messages": HI, "max_tokens": 200, "temperature": 0, **fields}
    link.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    return link


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
