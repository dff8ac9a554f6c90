"""The offline engine loads the media of the next requests while it computes; errors come in the order of requests."""

from __future__ import annotations

import asyncio
import io

import pytest
from PIL import Image

from vlmserve import LLM
from vlmserve_common.errors import BadRequestError


def picture(shade: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (64, 64), (shade, 0, 0)).save(file, "PNG")
    return file.getvalue()


def about(*pictures: bytes):
    parts = [{"type": "image", "image": data} for data in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is this?"}]}]


@pytest.fixture(scope="module")
def llm():
    with LLM() as made:
        yield made


def test_the_next_request_s_media_are_loaded_meanwhile(llm, monkeypatch):
    load, second = llm._media.load, asyncio.Event()
    calls = []

    async def waiting(media):
        calls.append(media)
        if len(calls) == 1:
            await asyncio.wait_for(second.wait(), 60)  # for ever, if requests were loaded one after the other
        second.set()
        return await load(media)

    monkeypatch.setattr(llm._media, "load", waiting)
    conversations = [about(picture(shade)) for shade in (10, 200)]
    together = llm.chat_batch(conversations, max_tokens=4)
    monkeypatch.undo()
    assert len(calls) == 2
    assert [answer.text for answer in together] == [llm.chat(one, max_tokens=4).text for one in conversations]


def test_the_first_bad_request_is_named(llm):
    with pytest.raises(BadRequestError, match="not a picture"):
        llm.chat_batch([about(picture(1)), about(b"no picture"), [{"role": "nobody", "content": "x"}]], max_tokens=2)
    assert llm.chat("Hello", max_tokens=2).text
    assert llm.stats().num_running_reqs == 0


def test_a_request_of_many_media_is_loaded_alone(llm):
    [one, other] = llm.chat_batch([about(*[picture(shade) for shade in range(20)]), about(picture(3))], max_tokens=2)
    assert one.prompt_tokens > other.prompt_tokens
