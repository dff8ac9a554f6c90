"""A server between whose processes a message is damaged: its client hears of it, and nobody else is harmed."""

from __future__ import annotations

import sys
from collections.abc import Iterator
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


class Damaged:
    """The server and a client of it, while a message is damaged."""

    def __init__(self, server: ServerProcess, client: openai.OpenAI) -> None:
        self.server, self.client, self.folder = server, client, server.runtime.parent
        self.steps = server.figures()["forward_steps_total"]

    def damage(self, what: str) -> None:
        """Order that the next message be damaged which is such a one."""
        (self.folder / "finished").write_text(what)
        (self.folder / "finished").rename(self.folder / "damage")

    def ask(self, **options: Any) -> Any:
        messages: Any = [{"role": "user", "content": [PICTURE, {"type": "text", "text": "What is there?"}]}]
        options = {"max_tokens": 12, **options}
        return self.client.chat.completions.create(model="tiny", messages=messages, temperature=0, **options)

    def text(self, **options: Any) -> str:
        return self.ask(**options).choices[0].message.content

    def await_idle(self) -> None:
        """Wait until nothing is under way; then nothing may be left, and nobody's answer was computed to its end."""
        await_that(lambda: not any(map(self.server.figures().get, UNDER_WAY)))
        assert self.server.figures()["forward_steps_total"] - self.steps < LONG["max_tokens"] - 500
        [shared] = (SharedArrays(path) for path in self.server.directories() if "/shm/" in str(path))
        assert shared.outstanding() == 0
        assert not (self.folder / "damage").exists(), "what was to be damaged was not sent"


@pytest.fixture
def rig(server: ServerProcess) -> Iterator[Damaged]:
    with server.client() as client:
        yield Damaged(server, client)


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
def test_the_client_of_a_lost_message_gets_an_error(rig: Damaged, what: str, options: dict[str, Any]) -> None:
    want = rig.text()
    rig.damage(what)
    with pytest.raises(openai.InternalServerError) as caught:
        rig.ask(**options, **LONG)
    assert caught.value.status_code == 500
    check_lost(caught.value)
    rig.await_idle()
    assert rig.text() == want


@pytest.mark.parametrize("what", ["scheduler BatchTokenOutput", "detokenizer BatchTextOutput"])
def test_in_the_middle_of_an_answer(rig: Damaged, what: str) -> None:
    stream = iter(rig.ask(stream=True, **LONG))
    next(stream)
    rig.damage(what)
    with pytest.raises(openai.APIError) as caught:
        list(stream)
    check_lost(caught.value)
    rig.await_idle()


def test_others_who_are_being_answered_go_on(rig: Damaged) -> None:
    other = {**LONG, "max_tokens": 400}
    want = rig.text(**other)
    stream = iter(rig.ask(stream=True, **other))
    got = [next(stream)]
    rig.damage("api TokenizedGenerateReqInput")
    with pytest.raises(openai.InternalServerError):
        rig.ask(**LONG)
    got += stream
    assert "".join(chunk.choices[0].delta.content or "" for chunk in got) == want
    rig.await_idle()


def test_an_abort_that_is_lost_is_made_up_for(rig: Damaged) -> None:
    stream = rig.ask(stream=True, **LONG)
    next(iter(stream))
    rig.damage("api AbortReq")
    stream.close()
    rig.server.await_log("dropped a malformed message of 3 frames, about 1 requests: WireError: AbortReq")
    rig.await_idle()


@pytest.mark.parametrize("what", ["api EncodeReqInput", "scheduler EncodeOutput", "detokenizer EncodeOutput"])
def test_media_to_encode_ahead_of_time(rig: Damaged, what: str) -> None:
    body = {"messages": [{"role": "user", "content": [PICTURE]}]}
    rig.damage(what)
    with pytest.raises(openai.InternalServerError) as caught:
        rig.client.post("/warmup", body=body, cast_to=object)
    check_lost(caught.value)
    rig.await_idle()
    assert rig.client.post("/warmup", body=body, cast_to=object)
