"""An answer as it comes: its text, and in the end what it took."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """ttft_s, total_s: seconds from sending the request to the first text and to the end. Tokens otherwise;
    media_tokens: by kind ("image", "video"), of the whole prompt.

    prepare_s, first_token_s: the server's own `timings`; None where it tells none.
    """

    ttft_s: float
    total_s: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    media_tokens: Mapping[str, int]
    prepare_s: float | None = None
    first_token_s: float | None = None

    def stages(self) -> tuple[tuple[str, float], ...]:
        """What the time went into, in order, in seconds; their sum is total_s."""
        answer = ("answer", self.total_s - self.ttft_s)
        if self.prepare_s is None or self.first_token_s is None:
            return (("until the first word", self.ttft_s), answer)
        return (
            ("on the way", max(0.0, self.ttft_s - self.first_token_s)),
            ("prepare", self.prepare_s),
            ("encode and prefill", self.first_token_s - self.prepare_s),
            answer,
        )

    def tokens_per_s(self) -> float | None:
        """Of the answer after its first token; None where there is nothing to measure."""
        seconds = self.total_s - self.ttft_s
        return (self.completion_tokens - 1) / seconds if self.completion_tokens > 1 and seconds > 0 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """An answer so far. stats: None until it is whole.

    media: the server's report on each medium of the prompt, in order. notes: what the user should know, in sentences.
    """

    text: str
    stats: Stats | None = None
    media: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()


async def read_answer(
    chunks: AsyncIterator[Mapping[str, Any]], clock: Callable[[], float] = time.perf_counter
) -> AsyncGenerator[Answer, None]:
    """The answer after each piece of text, and in the end the whole one.

    chunks: of a request that is sent just now, with usage. clock: seconds.
    """
    started = clock()
    first_s: float | None = None
    text = ""
    finish: str | None = None
    last: Mapping[str, Any] = {}
    async for chunk in chunks:
        last = chunk
        for choice in chunk["choices"]:
            finish = choice.get("finish_reason") or finish
            piece = choice["delta"].get("content")
            if piece:
                first_s = clock() - started if first_s is None else first_s
                text += piece
                yield Answer(text=text)
    total_s = clock() - started
    media = tuple((last.get("mm_report") or {}).get("media", ()))
    media_tokens: Counter[str] = Counter()
    for medium in media:
        media_tokens[medium["kind"]] += medium["tokens"]
    usage = last.get("usage") or {}
    timings = last.get("timings") or {}
    stats = Stats(
        ttft_s=total_s if first_s is None else first_s,
        total_s=total_s,
        prompt_tokens=usage.get("prompt_tokens", 0),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        completion_tokens=usage.get("completion_tokens", 0),
        media_tokens=media_tokens,
        prepare_s=timings.get("prepare_s"),
        first_token_s=timings.get("first_token_s"),
    )
    notes = ["the answer is cut off at the most tokens allowed"] if finish == "length" else []
    yield Answer(text=text, stats=stats, media=media, notes=(*notes, *last.get("warnings", ())))
