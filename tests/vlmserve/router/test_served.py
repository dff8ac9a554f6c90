"""The whole: two real servers, the command in a process of its own, and the official client."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.vlmserve.server_process import SAMPLES, ServerProcess, await_that, data_url, serving
from tests.vlmserve.test_live_served import png
from vlmserve.commands.client.chat_client import ChatClient
from vlmserve.commands.client.live import LiveSession

MODEL = "tiny"
PICTURE = [
    {"type": "image_url", "image_url": {"url": data_url(SAMPLES / "shapes.png")}},
    {"type": "text", "text": "Describe the picture."},
]


@pytest.fixture(scope="module")
def other(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with serving(tmp_path_factory.mktemp("other") / "run", model=default_model) as server:
        yield server


@pytest.fixture(scope="module")
def router(
    shared_server: ServerProcess, other: ServerProcess, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    urls = [f"http://127.0.0.1:{server.port()}" for server in (shared_server, other)]
    words = [sys.executable, "-m", "vlmserve.cli", "router", "--port", "0", "--replica", *urls]
    router = ServerProcess(words, tmp_path_factory.mktemp("router"))
    try:
        await_that(lambda: router.get("health")[0] == 200)
        yield router
    finally:
        router.end()


def ask(client: openai.OpenAI, content: object = PICTURE, **fields):
    messages = [{"role": "user", "content": content}]
    return client.chat.completions.create(model=MODEL, messages=messages, temperature=0, **{"max_tokens": 24, **fields})


def states(router: ServerProcess) -> dict[str, str]:
    return {one["url"]: one["state"] for one in json.loads(router.get("workers")[1])["workers"]}


def test_answers_are_those_of_a_server(router, shared_server):
    client = router.client()
    direct = ask(shared_server.client()).choices[0].message.content
    assert [model.id for model in client.models.list()] == [MODEL]
    assert [ask(client).choices[0].message.content for _ in range(2)] == [direct] * 2
    chunks = list(ask(client, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == direct
    assert len(chunks) > 5
    with pytest.raises(openai.NotFoundError, match="no model"):
        client.chat.completions.create(model="none", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.NotFoundError, match="there is nothing at /v1/moderations"):
        client.moderations.create(model=MODEL, input="x")


def test_what_lives_at_one_server_is_found(router, shared_server):
    client = router.client()
    direct = ask(shared_server.client()).choices[0].message.content
    file = client.files.create(file=SAMPLES / "shapes.png", purpose="user_data")
    part = {"type": "image_url", "image_url": {"file_id": file.id}}
    assert ask(client, [part, PICTURE[1]]).choices[0].message.content == direct
    assert [one.id for one in client.files.list()] == [file.id]
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions"}
    line["body"] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
    asked = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    batch = client.batches.create(input_file_id=asked.id, endpoint="/v1/chat/completions", completion_window="24h")
    await_that(lambda: client.batches.retrieve(batch.id).status == "completed")
    answers = client.files.content(client.batches.retrieve(batch.id).output_file_id).read()
    assert json.loads(answers)["response"]["status_code"] == 200
    assert [one.id for one in client.batches.list()] == [batch.id]
    for one in client.files.list():
        assert client.files.delete(one.id).deleted
    first = client.responses.create(model=MODEL, input="What is red?", max_output_tokens=8)
    second = client.responses.create(model=MODEL, input="And blue?", previous_response_id=first.id, max_output_tokens=8)
    assert client.responses.retrieve(second.id).previous_response_id == first.id


def test_live_video_goes_to_the_server_of_its_session(router, shared_server, other):
    """With the client of `vlmserve watch` and the demo. Answers are those of a chat with all frames."""
    files = [png(seed) for seed in range(4)]
    asked = {"max_tokens": 8, "temperature": 0}

    async def watch():
        client = ChatClient(f"http://127.0.0.1:{router.port()}")
        async with contextlib.AsyncExitStack() as stack:
            sessions = [
                await stack.enter_async_context(LiveSession(client, {"live": {"fps": 2}, "model": MODEL}))
                for _ in range(4)
            ]
            for place, file in enumerate(files):
                for session in sessions:
                    await session.show(place / 2, file)
            flushed = [await session.flush() for session in sessions]
            assert [one["done"] for one in flushed] == [4] * 4
            held = [len(json.loads(server.get("v1/sessions")[1])["data"]) for server in (shared_server, other)]
            answers = [await session.ask("Why?", return_mm_report=True, **asked) for session in sessions]
            standing = [one async for one in sessions[0].standing("Why?", 1, max_answers=1, **asked)]
            return held, [*answers, *(one["answer"] for one in standing)]

    held, answers = asyncio.run(watch())
    assert sum(held) == 4
    assert all(held), "on both servers"
    size = answers[0]["mm_report"]["media"][0]["final_size"]
    urls = [f"data:image/png;base64,{base64.b64encode(file).decode()}" for file in files]
    sized = {"resized_width": size["width"], "resized_height": size["height"]}
    question = [{"type": "video", "video": urls, "sample_fps": 2, **sized}, {"type": "text", "text": "Why?"}]
    whole = ask(router.client(), question, max_tokens=8).choices[0].message.content
    assert [one["choices"][0]["message"]["content"] for one in answers] == [whole] * 5
    assert json.loads(router.get("v1/sessions")[1])["data"] == []


def test_a_server_that_is_killed_is_replaced_and_a_router_ends_cleanly(router, shared_server, other):
    first, second = (f"http://127.0.0.1:{server.port()}" for server in (shared_server, other))
    client = router.client()
    assert router._ask("DELETE", f"workers/{first}")[0] == 202
    await_that(lambda: first not in states(router))
    stream = ask(client, "Tell me all.", stream=True, max_tokens=2000, extra_body={"ignore_eos": True})
    next(stream)
    other.end()
    with pytest.raises(openai.APIError, match="the server was lost in the middle of its answer"):
        list(stream)
    with pytest.raises(openai.InternalServerError, match="no server can answer now"):
        ask(client)
    assert router.get("health")[0] == 503
    assert router.post("workers", url=first)[0] == 201
    assert ask(client).choices[0].message.content == ask(shared_server.client()).choices[0].message.content
    assert states(router)[second] == "unhealthy"
    router.process.send_signal(signal.SIGTERM)
    assert router.wait() == 0
    assert "Traceback" not in "".join(router.log)
