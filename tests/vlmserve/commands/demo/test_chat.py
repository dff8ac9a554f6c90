"""Questions put to the real HTTP server, without a page and without a model behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from tests.vlmserve.api.fake_engine import MODEL
from tests.vlmserve.commands.served import fake_server
from vlmserve.commands.client.chat_client import ChatClient
from vlmserve.commands.demo.chat import Chat, Message, Question, View
from vlmserve.commands.demo.pictures import FOLDER

KEY = "the key"
PICTURE = Question(text="What is it?", media=(FOLDER / "red-circle.png",))
SETTINGS = {"max_tokens": "60", "max_pixels": "20000"}
BOXES = '[{"bbox_2d": [0, 0, 500, 500], "label": "it"}]'


@pytest.fixture
def server(checkpoint):
    with fake_server(checkpoint, api_key=KEY) as (served, url):
        yield served, url
        assert served.frontend.manager.num_pending == 0


@pytest.fixture
def served(server):
    return server[0]


@pytest.fixture
def chat(server):
    return Chat(ChatClient(server[1], api_key=KEY), MODEL)


def views(
    chat: Chat, question: Question, messages: list[Message] | None = None, settings: Mapping[str, str] = SETTINGS
) -> list[View]:
    async def collect() -> list[View]:
        return [view async for view in chat.ask(messages or [], question, settings)]

    return asyncio.run(collect())


def last_said(view: View) -> str:
    return view.messages[-1]["content"][0]["text"]


def is_error(view: View) -> bool:
    return view.messages[-1].get("metadata") == {"title": "Error"}


def test_an_answer_comes_bit_by_bit(served, chat):
    served.scheduler.say(BOXES)
    first, *growing, whole = views(chat, PICTURE)
    assert [part["type"] for part in first.messages[-1]["content"]] == ["file", "text"]
    texts = [last_said(view) for view in growing]
    assert len(texts) > 2
    assert all(BOXES.startswith(text) for text in texts)
    assert last_said(whole) == BOXES
    outcome = whole.outcome
    assert outcome is not None
    assert outcome.drawing is not None
    assert outcome.drawing.rows[0][:2] == (1, "it")
    [medium] = outcome.media
    assert outcome.stats.media_tokens == {"image": medium.report["tokens"]}
    assert 0 < outcome.stats.media_tokens["image"] < outcome.stats.prompt_tokens
    assert outcome.stats.first_token_s is not None
    assert not any(view.outcome for view in growing)


def test_a_refusal_is_shown_as_it_is_and_forgotten(served, chat, tmp_path):
    file = tmp_path / "note.png"
    file.write_bytes(b"no picture at all")
    refused = views(chat, Question(text="?", media=(file,)))[-1]
    assert is_error(refused)
    assert last_said(refused).startswith("messages[0].content[0]: the data is not a picture of a supported format")
    after = views(chat, PICTURE, list(refused.messages))[-1]
    assert not is_error(after)
    [request] = served.scheduler.requests
    assert len(request.mm_inputs.items) == 1


def test_what_is_no_number_is_not_sent(served, chat):
    refused = views(chat, PICTURE, settings={"temperature": "warm"})[-1]
    assert is_error(refused)
    assert last_said(refused) == "temperature is 'warm'; it must be a number, or empty to leave it to the server"
    assert served.scheduler.requests == []


def test_a_limit_of_the_server_is_told(served, chat):
    served.scheduler.say("red")
    outcome = views(chat, PICTURE, settings={"max_pixels": "100000000"})[-1].outcome
    assert outcome is not None
    assert "max_pixels" in outcome.notes[0]


def test_a_failure_after_the_beginning_keeps_what_was_said(served, chat):
    served.scheduler.pause_after = 3

    async def ask() -> list[View]:
        seen = []
        async for view in chat.ask([], PICTURE, SETTINGS):
            seen.append(view)
            if len(seen) == 3:
                served.frontend.fail_all("the engine is gone")
        return seen

    last = asyncio.run(ask())[-1]
    assert is_error(last)
    assert last_said(last) == "the engine is gone"
    assert last.messages[-2]["role"] == "assistant"


def test_a_file_that_is_gone(chat, tmp_path):
    gone = views(chat, Question(text="?", media=(tmp_path / "gone.png",)))[-1]
    assert is_error(gone)
    assert "gone.png" in last_said(gone)
