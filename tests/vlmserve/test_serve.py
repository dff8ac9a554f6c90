"""`vlmserve serve` as a user starts it, on a tiny checkpoint: all three real processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.default_model import copy_default_model
from tests.vlmserve.server_process import SAMPLES, ServerProcess, await_that, data_url, serve


@pytest.fixture
def client(shared_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with shared_server.client() as client:
        yield client


def _question(picture: str | None = "shapes.png", text: str = "What is in this picture?") -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if picture is not None:
        content.insert(0, {"type": "image_url", "image_url": {"url": data_url(SAMPLES / picture)}})
    return [{"role": "user", "content": content}]


def _answer(client: openai.OpenAI, messages: list[dict[str, Any]], **options: Any) -> Any:
    return client.chat.completions.create(
        model="tiny", messages=messages, **{"max_tokens": 12, "temperature": 0, **options}
    )


def _tokens(answer: Any) -> list[str]:
    return [entry.token for entry in answer.choices[0].logprobs.content]


def test_answers_about_a_picture_the_same_way_streamed_or_not(client: openai.OpenAI) -> None:
    whole = _answer(client, _question())
    assert whole.usage.prompt_tokens > 48, "a 448x320 picture is made 8 x 6 tokens here"
    assert whole.choices[0].finish_reason in ("stop", "length")
    stream = _answer(client, _question(), stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def test_the_picture_matters_and_batch_mates_do_not(client: openai.OpenAI) -> None:
    questions = [_question("shapes.png"), _question("receipt.png"), _question(None), _question("shapes.png", "Why?")]
    alone = [_tokens(_answer(client, question, logprobs=True)) for question in questions]
    assert len({tuple(tokens) for tokens in alone}) == len(questions)
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda q: _tokens(_answer(client, q, logprobs=True)), questions * 2))
    assert together == alone * 2


def test_a_bad_request_is_its_own_sender_s_problem(client: openai.OpenAI) -> None:
    messages = _question()
    messages[0]["content"][0]["image_url"]["url"] = "data:image/png;base64,AAAA"
    with pytest.raises(openai.BadRequestError):
        _answer(client, messages)
    with pytest.raises(openai.BadRequestError):
        _answer(client, _question(None, "word " * 9000))
    assert _answer(client, _question(None)).choices


def test_a_client_that_goes_away_frees_its_request(client: openai.OpenAI, shared_server: ServerProcess) -> None:
    assert shared_server.post("flush_cache")[0] == 200  # sessions hold prefixes that do not count as reusable
    stream = _answer(client, _question(), stream=True, max_tokens=3000, extra_body={"ignore_eos": True})
    next(iter(stream))
    assert shared_server.figures()["num_requests_running"] == 1
    stream.close()
    await_that(lambda: not shared_server.figures()["num_requests_running"])
    figures = shared_server.figures()
    assert figures["kv_cache_free_tokens"] + figures["kv_cache_reusable_tokens"] == figures["kv_cache_tokens"] == 4096


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(None, "there is no folder"), ('{"model_type": "llama"}', "llama")],
)
def test_a_checkpoint_that_cannot_be_served_is_one_line(tmp_path: Path, content: str | None, complaint: str) -> None:
    folder = tmp_path / "model"
    if content is not None:
        folder.mkdir()
        copy_default_model(folder)  # nothing else is wrong with it
        (folder / "config.json").write_text(content)
    server = serve(tmp_path / "run", model=folder)
    assert server.wait() == 2
    assert complaint in server.log[-1]
    assert server.log[-1].startswith("vlmserve: error: ")
    assert "Traceback" not in "".join(server.log)
    assert json.dumps(str(folder))[1:-1] in server.log[-1]
