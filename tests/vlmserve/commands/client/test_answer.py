"""From the chunks of a stream to text and figures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from vlmserve.commands.client.chat_client import ChatAnswer, ChatClient, Stats, read_answer


def chunk(text: str | None = None, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {} if text is None else {"content": text}, "finish_reason": finish}]}


LAST = {
    "choices": [],
    "usage": {"prompt_tokens": 90, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 40}},
    "mm_report": {
        "media": [{"kind": "image", "tokens": 20}, {"kind": "video", "tokens": 30}, {"kind": "image", "tokens": 5}]
    },
    "timings": {"prepare_s": 0.1, "first_token_s": 0.4},
    "warnings": ["max_pixels was lowered"],
}


def answers(chunks: list[dict[str, Any]], times: list[float]) -> list[ChatAnswer]:
    """The clock is read when the request is sent, at the first text, and at the end."""

    async def stream() -> AsyncIterator[dict[str, Any]]:
        for piece in chunks:
            yield piece

    clock: Iterator[float] = iter(times)

    async def collect() -> list[ChatAnswer]:
        return [answer async for answer in read_answer(stream(), lambda: next(clock))]

    return asyncio.run(collect())


def test_text_grows_and_figures_come_last():
    *growing, whole = answers([chunk(""), chunk("A "), chunk("cat"), chunk(finish="stop"), LAST], [10.0, 10.5, 12.5])
    assert [answer.text for answer in growing] == ["A ", "A cat"]
    assert all(answer.stats is None for answer in growing)
    assert whole.text == "A cat"
    assert whole.stats == Stats(
        ttft_s=0.5,
        total_s=2.5,
        prompt_tokens=90,
        cached_tokens=40,
        completion_tokens=5,
        media_tokens={"image": 25, "video": 30},
        prepare_s=0.1,
        first_token_s=0.4,
    )
    assert whole.stats.tokens_per_s() == 2.0
    assert whole.media == tuple(LAST["mm_report"]["media"])
    assert whole.notes == ("max_pixels was lowered",)


def test_an_answer_that_is_cut_off_says_so():
    assert answers([chunk("A"), chunk(finish="length"), LAST], [0, 1, 2])[-1].notes[0].startswith("the answer is cut")


def test_a_server_that_tells_nothing_but_text():
    whole = answers([chunk("A"), chunk(finish="stop")], [0.0, 1.0, 1.0])[-1]
    assert (whole.text, whole.media, whole.notes) == ("A", (), ())
    assert whole.stats is not None
    assert whole.stats.stages() == (("until the first word", 1.0), ("answer", 0.0))
    assert whole.stats.tokens_per_s() is None


def test_stages_add_up_to_the_whole():
    stats = answers([chunk("A"), chunk(finish="stop"), LAST], [10.0, 10.5, 12.5])[-1].stats
    assert stats is not None
    stages = dict(stats.stages())
    assert list(stages) == ["on the way", "prepare", "encode and prefill", "answer"]
    assert list(stages.values()) == pytest.approx([0.1, 0.1, 0.3, 2.0])


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_forms_of_a_servers_address(suffix):
    assert ChatClient("http://host:1" + suffix).url == "http://host:1"
