"""Load for a benchmark: distinct pictures with a short question, sent to an OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    import httpx2


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """One picture (PNG bytes) and a question; the answer is exactly output_tokens long, greedy."""

    picture: bytes
    question: str
    output_tokens: int

    def messages(self, picture: object) -> list[dict[str, object]]:
        """The conversation in OpenAI's form; `picture` is the image part."""
        return [{"role": "user", "content": [picture, {"type": "text", "text": self.question}]}]


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of one request from sending it: first token, whole answer; and its output tokens and text.

    gaps_s: between the chunks that brought tokens. prompt_tokens: as the server counts them.
    """

    ttft_s: float
    total_s: float
    tokens: int
    text: str
    gaps_s: tuple[float, ...] = ()
    prompt_tokens: int = 0

    @property
    def per_token_s(self) -> float:
        """Mean time between tokens after the first."""
        return (self.total_s - self.ttft_s) / max(self.tokens - 1, 1)


@dataclass(frozen=True, kw_only=True)
class LoadResult:
    """Several requests together, and the seconds from the first sent to the last answered."""

    timings: tuple[Timing, ...]
    wall_s: float

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second over all requests."""
        return sum(t.tokens for t in self.timings) / self.wall_s

    @property
    def pictures_per_s(self) -> float:
        """Requests, of one picture each, per second."""
        return len(self.timings) / self.wall_s


def make_requests(count: int, *, side: int, output_tokens: int, seed: int) -> list[BenchRequest]:
    """`count` requests with pictures of side x side pixels that differ in every pixel, so that no cache helps."""
    made = []
    for index in range(count):
        rng = np.random.default_rng([seed, index])
        small = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        image = Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC)
        file = io.BytesIO()
        image.save(file, "PNG")
        question = "What is shown in this picture? Answer in a few words."
        made.append(BenchRequest(picture=file.getvalue(), question=question, output_tokens=output_tokens))
    return made


def run_load(base_url: str, model: str, requests: Sequence[BenchRequest], concurrency: int) -> LoadResult:
    """Send the requests, `concurrency` at a time, streaming. RuntimeError for an answer that is not a whole one."""
    return asyncio.run(_run(base_url, model, requests, concurrency))


async def _run(base_url: str, model: str, requests: Sequence[BenchRequest], concurrency: int) -> LoadResult:
    import httpx2

    limits = httpx2.Limits(max_connections=concurrency)
    gate = asyncio.Semaphore(concurrency)
    async with httpx2.AsyncClient(base_url=base_url, timeout=None, limits=limits, trust_env=False) as client:

        async def one(request: BenchRequest) -> Timing:
            async with gate:
                return await _ask(client, model, request)

        started = time.perf_counter()
        timings = await asyncio.gather(*map(one, requests))
        return LoadResult(timings=tuple(timings), wall_s=time.perf_counter() - started)


def refusal(status: int, body: bytes) -> str:
    """What a server says that does not answer."""
    text = body.decode(errors="replace")
    with contextlib.suppress(ValueError, LookupError, TypeError):
        text = str(json.loads(text)["error"]["message"])
    return f"HTTP {status}: {text[:300]}"


def picture_part(picture: bytes) -> dict[str, object]:
    """A PNG file as a part of a message."""
    url = "data:image/png;base64," + base64.b64encode(picture).decode()
    return {"type": "image_url", "image_url": {"url": url}}


async def ask(client: httpx2.AsyncClient, model: str, messages: object, output_tokens: int) -> Timing:
    """The timing of one streamed answer. RuntimeError with the server's words if there is none."""
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        # one chunk a token even where its text is held back, so that the first token's time is seen
        "logprobs": True,
    }
    started = time.perf_counter()
    times: list[float] = []
    usage: dict[str, int] = {}
    text = ""
    async with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        if reply.status_code != 200:
            raise RuntimeError(refusal(reply.status_code, await reply.aread()))
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise RuntimeError(f"the answer broke off: {json.dumps(chunk['error'])[:300]}")
            for choice in chunk["choices"]:
                if choice.get("logprobs") or choice["delta"].get("content"):
                    times.append(time.perf_counter())
                text += choice["delta"].get("content") or ""
            usage = chunk.get("usage") or usage
    ended = time.perf_counter()
    return Timing(
        ttft_s=(times[0] if times else ended) - started,
        total_s=ended - started,
        tokens=usage.get("completion_tokens", 0),
        text=text,
        gaps_s=tuple(after - before for before, after in pairwise(times)),
        prompt_tokens=usage.get("prompt_tokens", 0),
    )


async def _ask(client: httpx2.AsyncClient, model: str, request: BenchRequest) -> Timing:
    timing = await ask(client, model, request.messages(picture_part(request.picture)), request.output_tokens)
    if timing.tokens != request.output_tokens:
        raise RuntimeError(f"an answer of {timing.tokens} tokens, {request.output_tokens} were asked for")
    return timing
