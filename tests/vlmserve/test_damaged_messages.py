"""A server between whose processes a message is damaged: its client hears of it, and nobody else is harmed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.vlmserve.server_process import SAMPLES, ServerProcess, await_that, data_url
from vlmserve_common.transport.shm import SharedArrays

PICTURE = {"type": "image_url", "image_url": {"url": data_url(SAMPLES / "shapes.png")}}
UNDER_WAY = ("num_requests_running", "num_requests_waiting", "num_warmups")
LONG: dict[str, Any] = {"max_tokens": 3000, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("damaging")
    words = [sys.executable, "-m", "tests.vlmserve.altered_server", str(default_model)]
    server = ServerProcess(words, folder / "run", DAMAGE=str(folder / "damage"))
    yield server
    server.end()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


@pytest.fixture
def damage(server: ServerProcess) -> Callable[[str], None]:
    """Orders that a message be damaged."""

    def order(what: str) -> None:
        finished = server.runtime.parent / "finished"
        finished.write_text(what)
        finished.rename(server.runtime.parent / "damage")

    return order


def ask(client: openai.OpenAI, **options: Any) -> Any:
    messages = [{"role": "user", "content": [PICTURE, {"type": "text", "text": "What is there?"}]}]
    return client.chat.completions.create(
        model="tiny", messages=messages, temperature=0, **{"max_tokens": 12, **options}
    )


@pytest.fixture
def await_idle(server: ServerProcess) -> Callable[[], None]:
    """Waits until nothing is under way; then nothing may be left, and nobody's answer was computed to its end."""
    server.port()
    steps = server.figures()["forward_steps_total"]

    def wait() -> None:
        await_that(lambda: not any(map(server.figures().get, UNDER_WAY)))
        assert server.figures()["forward_steps_total"] - steps < LONG["max_tokens"] - 500
        [shared] = (SharedArrays(path) for path in server.directories() if "/shm/" in str(path))
        assert shared.outstanding() == 0
        assert not (server.runtime.parent / "damage").exists(), "what was to be damaged was not sent"

    return wait


def check_lost(error: openai.APIError) -> None:
    assert error.type == "server_error"
    assert "a message about this request was damaged on its way between the server's processes" in str(error)


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("api TokenizedGenerateReqInput", {}),
        ("api BatchTokenizedGenerateReqInput", {"n": 3}),
        ("scheduler BatchTokenOutput", {}),
        ("scheduler BatchTokenOutput", {"n": 3}),
        ("detokenizer BatchTextOutput", {}),
    ],
)
def test_the_client_of_a_lost_message_gets_an_error(
    await_idle: Callable[[], None],
    client: openai.OpenAI,
    damage: Callable[[str], None],
    what: str,
    options: dict[str, Any],
) -> None:
    want = ask(client).choices[0].message.content
    damage(what)
    with pytest.raises(openai.InternalServerError) as caught:
        ask(client, **options, **LONG)
    assert caught.value.status_code == 500
    check_lost(caught.value)
    await_idle()
    assert ask(client).choices[0].message.content == want


@pytest.mark.parametrize("what", ["scheduler BatchTokenOutput", "detokenizer BatchTextOutput"])
def test_in_the_middle_of_an_answer(
    await_idle: Callable[[], None], client: openai.OpenAI, damage: Callable[[str], None], what: str
) -> None:
    stream = iter(ask(client, stream=True, **LONG))
    next(stream)
    damage(what)
    with pytest.raises(openai.APIError) as caught:
        list(stream)
    check_lost(caught.value)
    await_idle()


def test_others_who_are_being_answered_go_on(
    await_idle: Callable[[], None], client: openai.OpenAI, damage: Callable[[str], None]
) -> None:
    other = {**LONG, "max_tokens": 400}
    want = ask(client, **other).choices[0].message.content
    stream = iter(ask(client, stream=True, **other))
    got = [next(stream)]
    damage("api TokenizedGenerateReqInput")
    with pytest.raises(openai.InternalServerError):
        ask(client, **LONG)
    got += stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in got) == want
    await_idle()


def test_an_abort_that_is_lost_is_made_up_for(
    server: ServerProcess, await_idle: Callable[[], None], client: openai.OpenAI, damage: Callable[[str], None]
) -> None:
    stream = ask(client, stream=True, **LONG)
    next(iter(stream))
    damage("api AbortReq")
    stream.close()
    server.await_log("dropped a malformed message of 3 frames, about 1 requests: WireError: AbortReq")
    await_idle()


@pytest.mark.parametrize("what", ["api EncodeReqInput", "scheduler EncodeOutput", "detokenizer EncodeOutput"])
def test_media_to_encode_ahead_of_time(
    await_idle: Callable[[], None], client: openai.OpenAI, damage: Callable[[str], None], what: str
) -> None:
    body = {"messages": [{"role": "user", "content": [PICTURE]}]}
    damage(what)
    with pytest.raises(openai.InternalServerError) as caught:
        client.post("/warmup", body=body, cast_to=object)
    check_lost(caught.value)
    await_idle()
    assert client.post("/warmup", body=body, cast_to=object)
