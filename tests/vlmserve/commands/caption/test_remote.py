"""What is sent to servers, and how a captioner of servers starts."""

from __future__ import annotations

import asyncio
import base64
import contextlib
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
from vlmserve.config.checks import SettingsError

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
