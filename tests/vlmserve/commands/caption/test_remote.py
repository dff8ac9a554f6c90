"""What is sent to servers, how a captioner of servers starts, and what answers mean, of vlmserve and of others."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from typing import Any

import pytest

from tests.processors.clips import make_clip
from tests.processors.web import closed_port
from tests.vlmserve.commands.caption.stub_server import (
    Reply,
    StubServer,
    ToldTime,
    always,
    ask,
    captioner,
    completion,
    in_loop,
    said,
)
from tests.vlmserve.commands.warmup.media import png
from vlmserve.commands.batch.item import ChatRequest
from vlmserve.commands.caption.remote import RemoteCaptioner
from vlmserve.commands.caption.run import CaptionStopped
from vlmserve.commands.caption.servers import (
    Away,
    NoAnswer,
    ServerStanding,
    Unfit,
    choose,
    judge_answer,
    judge_models,
)
from vlmserve.config.checks import SettingsError
from vlmserve_common.errors import BadRequestError

# ---- what is sent


@in_loop
async def test_the_request_is_plain_openai_with_what_was_asked_for_beside_it():
    picture, clip = png(1), make_clip(4, width=56, height=56)
    parts = [
        {"type": "image", "image": picture, "detail": "low", "max_pixels": 3136},
        {"type": "video", "video": clip, "fps": 2.0},
        {"type": "image", "image": "https://host/a.png"},
        {"type": "video", "video": [picture, picture]},
        {"type": "text", "text": "What is this?"},
    ]

    async with StubServer(always(completion("a dog"))) as server, captioner(server, api_key="secret") as asked:
        request = ChatRequest(messages=[{"role": "user", "content": parts}], options={"max_tokens": 9})
        assert said(await asked.ask(request)) == "a dog"
    assert (asked.model, asked.notes()) == ("m", [])
    assert server.requests == ["GET /v1/models HTTP/1.1", "POST /v1/chat/completions HTTP/1.1"]
    assert [headers["authorization"] for headers in server.headers] == ["Bearer secret"] * 2
    png_url = "data:image/png;base64," + base64.b64encode(picture).decode()
    mp4_url = "data:video/mp4;base64," + base64.b64encode(clip).decode()
    content = [
        {"type": "image_url", "image_url": {"url": png_url, "detail": "low"}, "max_pixels": 3136},
        {"type": "video_url", "video_url": {"url": mp4_url}, "fps": 2.0},
        {"type": "image_url", "image_url": {"url": "https://host/a.png"}},
        {"type": "video", "video": [png_url, png_url]},
        {"type": "text", "text": "What is this?"},
    ]
    assert server.asked == [{"model": "m", "messages": [{"role": "user", "content": content}], "max_tokens": 9}]


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("http://host:8000", "http://host:8000/v1"),
        ("http://host:8000/v1/", "http://host:8000/v1"),
        ("https://host/vlm", "https://host/vlm/v1"),
        ("https://host/v1beta/openai/", "https://host/v1beta/openai"),
    ],
)
def test_addresses(url, base):
    made = RemoteCaptioner([url, base], api_key=None, model=None, request_timeout_s=1, server_timeout_s=1)
    assert [server.url for server in made._servers] == [base]


@pytest.mark.parametrize(
    ("url", "key"),
    [
        ("host:8000", None),
        ("ftp://host", None),
        ("http://:8000", None),
        ("http://host:99999", None),
        ("http://user:word@host", None),
        ("http://host/?a=b", None),
        ("http://host", "a\nb"),
        ("http://host", "ä"),
    ],
)
def test_addresses_and_keys_that_cannot_be(url, key):
    with pytest.raises(SettingsError, match=r"--base-url|--api-key") as error:
        RemoteCaptioner([url], api_key=key, model=None, request_timeout_s=1, server_timeout_s=1)
    assert "word" not in str(error.value)


# ---- the start


async def stopped_at_start(*servers: StubServer | str, **settings: Any) -> str:
    time = ToldTime()
    async with captioner(*servers, time=time, started=False, **settings) as asked:
        starting = asyncio.ensure_future(asked.start())
        await time.passes_until(starting)
        with pytest.raises(CaptionStopped) as error:
            await starting
        return str(error.value)


@in_loop
async def test_nobody_there():
    url = f"http://127.0.0.1:{closed_port()}"
    told = await stopped_at_start(url)
    assert told == f"no server answers (waited 60 s, --server-timeout-s): {url}/v1: connection refused"


@in_loop
async def test_a_server_that_starts_late_is_waited_for():
    time, server = ToldTime(), StubServer()
    await server.start()
    await server.die()
    async with captioner(server, time=time, started=False) as asked:
        starting = asyncio.ensure_future(asked.start())
        await time.passes(0.5)
        await time.passes(1.0)
        await server.start()
        await time.passes(2.0)
        await starting
        assert await ask(asked, "a") == "says a"
    await server.die()


@pytest.mark.parametrize(
    ("models", "told"),
    [
        (Reply(status=401, body={"error": {"message": "no"}}), "it refuses the API key, HTTP 401: no; set --api-key"),
        (Reply(body={"data": [{"id": "a"}, {"id": "b"}]}), "it serves 'a', 'b', not 'm' (--model)"),
        (Reply(status=404, body=b"<html>no such page"), "HTTP 404: <html>no such page; --base-url is the address of"),
        (Reply(status=302, headers={"Location": "/login"}, body=b""), "a redirect to /login, which is not followed"),
    ],
)
@in_loop
async def test_servers_that_cannot_be_used(models, told):
    async with StubServer() as server, StubServer() as good:
        server.models = models
        message = await stopped_at_start(server, model="m", api_key="secret")
        assert message.startswith(f"no server can be used: {server.url}/v1: ")
        assert told in message
        assert len(server.requests) == 1
        async with captioner(server, good, model="m") as asked:
            assert await ask(asked, "a") == "says a"
        (note,) = asked.notes()
        assert note.startswith(f"{server.url}/v1 was not used: ")
        assert told in note


@pytest.mark.parametrize(
    ("models", "told"),
    [([["a", "b"]], "name one model with --model; there are"), ([["a"], ["b"]], "there is none in common, but")],
)
@in_loop
async def test_a_model_is_to_be_named_where_it_is_not_clear(models, told):
    async with contextlib.AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(StubServer(models=names)) for names in models]
        assert told in await stopped_at_start(*servers)
        async with (
            StubServer(models=["b", "c"]) as first,
            StubServer(models=["a", "c"]) as second,
            captioner(first, second) as asked,
        ):
            assert (asked.model, asked.identity) == ("c", "server model c")


def judged(status: int, body: Any, *, wanted: int = 1, **headers: str) -> Any:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return judge_answer(status, named, content, wanted=wanted)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a dog", "a dog"),
        (None, ""),
        ([{"type": "text", "text": "a "}, {"type": "text", "text": "dog"}, {"type": "audio"}], "a dog"),
    ],
)
def test_text_in_all_its_forms(content, text):
    """llama.cpp and others leave out what OpenAI's schema asks for."""
    outcome = judged(200, {"choices": [{"message": {"content": content, "refusal": None}}]})
    choice = {"index": 0, "message": {"content": text, "refusal": None}, "finish_reason": None}
    assert outcome == {"choices": [choice], "usage": {}}


def test_too_few_answers_are_a_warning():
    body = {"choices": [{"message": {"content": "a"}, "finish_reason": "stop"}], "warnings": ["clamped"], "usage": None}
    content = judged(200, body, wanted=3)
    assert content["warnings"] == ["clamped", "the server gave 1 of 3 answers that were asked for (n)"]
    assert judged(200, body)["warnings"] == ["clamped"]


@pytest.mark.parametrize(
    ("status", "body", "told"),
    [
        (400, {"error": {"message": "m", "param": "p", "code": "c"}}, ("m", "p", "c")),
        (400, {"object": "error", "message": "m", "type": "BadRequest", "code": 400}, ("m", None, "BadRequest")),
        (422, {"detail": [{"loc": ["body"]}]}, ('[{"loc": ["body"]}]', None, None)),
        (400, {"error": "m"}, ("m", None, None)),
        (413, b"<html>413 too large</html>", ("HTTP 413: <html>413 too large</html>", None, None)),
        (404, {"error": {"message": "m", "param": "messages[0]"}}, ("m", "messages[0]", None)),
        (415, {"error": {"message": "m"}}, ("m", None, None)),
    ],
)  # fmt: skip
def test_the_requests_own_fault(status, body, told):
    outcome = judged(status, body)
    assert isinstance(outcome, BadRequestError)
    assert (outcome.message, outcome.param, outcome.code, outcome.status) == (*told, status)


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (401, {}, Unfit),
        (403, b"", Unfit),
        (404, {"error": {"message": "no such model", "param": "model"}}, Unfit),
        (404, b"<html>", NoAnswer),
        (408, {"error": {"message": "m"}}, NoAnswer),
        (405, b"", NoAnswer),
        (301, b"", NoAnswer),
        (503, b"", Away),
        (402, b"", Away),
        (200, b"[" * 100_000, NoAnswer),
        (200, {"choices": []}, NoAnswer),
        (200, {"error": {"message": "upstream is gone"}}, NoAnswer),
        (200, b'{"choices": {"a": 1}}', NoAnswer),
        (200, b'{"choices": [null]}', NoAnswer),
        (200, b'{"choices": [{"message": {"content": [1]}}]}', NoAnswer),
    ],
)
def test_what_is_not_the_requests_fault(status, body, kind):
    assert type(judged(status, body)) is kind


def test_when_to_ask_again():
    assert judged(429, b"", retry_after="12").retry_after_s == 12
    assert judged(503, b"", retry_after="Wed, 01 Jan 2200 00:00:00 GMT").retry_after_s > 1e9
    for nonsense in ("-1", "soon", "1e999", "nan", "²", "Wed, 01 Jan 2020 00:00:00 GMT"):
        assert judged(429, b"", retry_after=nonsense).retry_after_s == 0


@pytest.mark.parametrize(
    "content", [b"", b"<html>", b"[]", b'{"data": []}', b'{"data": [{}]}', b'{"data": ["m"]}', b'{"data": null}']
)
def test_a_list_of_models_that_is_none(content):
    assert isinstance(judge_models(200, {}, content), Away)


def test_a_slow_server_gets_fewer_and_an_idle_one_some():
    fast, slow = ServerStanding("http://fast"), ServerStanding("http://slow")
    for server, seconds in ((fast, 1.0), (slow, 4.0)):
        server.release(server.take())
        server.answered(0, seconds)
    taken = []
    for _ in range(10):
        server = choose([fast, slow], [])
        assert server is not None
        server.take()
        taken.append(server)
    assert (taken.count(fast), taken.count(slow)) == (8, 2)
    assert choose([fast, slow], [slow]) is fast
    assert choose([slow], [slow]) is slow


def test_pauses_grow_and_begin_anew_after_an_answer():
    server = ServerStanding("http://a")
    pauses = []
    for number in range(9):
        pauses.append(server.leave_out("dead"))
        server.is_in = True
        assert server.failed(server.era, number)
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    server.answered(server.era - 1, 1.0)  # says nothing about how it is now
    assert server.leave_out("dead") == 30
    server.is_in = True
    server.answered(server.era, 1.0)
    assert server.leave_out("dead") == 0.5


def test_one_request_that_always_fails_makes_the_pauses_no_longer():
    server = ServerStanding("http://a")
    server.leave_out("dead")
    for _ in range(6):
        server.is_in = True
        assert server.failed(server.era, 1)
        assert server.leave_out("poison") == 1


def test_a_server_that_answers_now_and_then_is_not_left_out():
    server = ServerStanding("http://a")
    for number in range(0, 20, 2):
        assert [server.failed(0, number), server.failed(0, number + 1)] == [False, False]
        server.answered(0, 1.0)
    assert [server.failed(0, number) for number in (20, 21, 22)] == [False, False, True]
