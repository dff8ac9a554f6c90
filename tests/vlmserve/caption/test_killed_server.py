"""Two servers with the built-in model, of which one is killed while it answers."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from tests.vlmserve.caption.asking import run, said
from tests.vlmserve.warmup.media import png
from vlmserve.caption.item import ChatRequest
from vlmserve.caption.remote import RemoteCaptioner
from vlmserve.client.own_server import OwnServer

_FLAGS = ("--num-threads", "1", "--max-total-tokens", "4096", "--log-level", "warning")


def _request(seed: int) -> ChatRequest:
    parts = [{"type": "image", "image": png(seed, 64, 64)}, {"type": "text", "text": "Describe the picture."}]
    return ChatRequest(messages=[{"role": "user", "content": parts}], options={"max_tokens": 12, "temperature": 0})


@pytest.mark.slow
def test_nothing_is_lost() -> None:
    async def test(first: OwnServer, second: OwnServer) -> None:
        captioner = RemoteCaptioner(
            [first.base_url, second.base_url], api_key=None, model=None, request_timeout_s=60, server_timeout_s=60
        )
        await captioner.start()
        room, answers = asyncio.Semaphore(6), 0

        async def ask(seed: int) -> dict[str, Any]:
            nonlocal answers
            async with room:
                answer = await captioner.ask(_request(seed))
            answers += 1
            if answers == 8:
                os.kill(first.pid, signal.SIGKILL)
            return answer

        try:
            seeds = [*range(20), *range(20)]
            texts = [said(answer) for answer in await asyncio.gather(*map(ask, seeds))]
            assert texts[:20] == texts[20:]
            assert all(texts)
            (note,) = captioner.notes()
            assert note.startswith(f"{first.base_url}/v1 was left out")
            assert captioner.identity == f"server model {captioner.model}"
        finally:
            await captioner.close()

    with OwnServer(_FLAGS) as first, OwnServer(_FLAGS) as second:
        run(test(first, second), wait_s=200)
