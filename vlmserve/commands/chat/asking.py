"""One question put to the server: its answer is passed on as it comes, and Ctrl-C ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import aclosing
from typing import Any

from vlmserve.commands.client.answer import Answer, Stats
from vlmserve.commands.client.chat_client import ChatClient


def ask(client: ChatClient, body: Mapping[str, Any], write: Callable[[str], None]) -> tuple[Answer, bool]:
    """The answer, and whether Ctrl-C stopped it; it is then what had come. Raises ServerError.

    Call it in the main thread, where Ctrl-C arrives. write: takes each piece of text.
    """
    answer = Answer(text="")

    async def read() -> None:
        nonlocal answer
        async with aclosing(client.ask(body)) as answers:
            async for now in answers:
                piece, answer = now.text[len(answer.text) :], now
                if piece:
                    write(piece)

    try:
        asyncio.run(read())
    except KeyboardInterrupt:
        return answer, True
    return answer, False


def stats_line(stats: Stats) -> str:
    """What an answer took, for people."""
    words = [f"first token after {stats.ttft_s:.2f} s"]
    rate = stats.tokens_per_s()
    if rate is not None:
        words.append(f"{rate:.1f} tokens/s")
    words.append(f"prompt {stats.prompt_tokens} tokens ({stats.cached_tokens} cached)")
    words.append(f"answer {stats.completion_tokens} tokens")
    return " · ".join(words)
