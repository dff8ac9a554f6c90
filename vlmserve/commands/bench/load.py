"""Load for a benchmark: questions sent to an OpenAI-compatible server, and what each waits for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import pairwise

import httpx2

from vlmserve.commands.bench.questions import Question
from vlmserve.commands.client.chat_client import ChatClient, ServerError


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of one request from sending it: first token, whole answer; and its output tokens and text.

    gaps_s: between the chunks that brought tokens. prompt_tokens: as the server counts them. number: of its question.
    """

    ttft_s: float
    total_s: float
    tokens: int
    text: str
    gaps_s: tuple[float, ...] = ()
    prompt_tokens: int = 0
    number: int = 0

    @property
    def per_token_s(self) -> float:
        """Mean time between tokens after the first."""
        return (self.total_s - self.ttft_s) / max(self.tokens - 1, 1)


@dataclass(frozen=True, kw_only=True)
class Round:
    """Several requests, and the seconds from the first sent to the last answered. failures: the words of each."""

    timings: tuple[Timing, ...]
    failures: tuple[str, ...] = ()
    wall_s: float

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second over all requests."""
        return sum(t.tokens for t in self.timings) / self.wall_s


class LoadClient:
    """Sends questions to a server. Close it. model: its name there, None for the first. proxies: whether those
    of the environment are used. timeout_s: for a connection, and between two pieces of an answer; None: for ever.

    logprobs: asked for, so that a token comes at once even where its text is held back; not every server has them.
    ignore_eos: a field for answers of their full length, which some servers refuse; may be set later.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        proxies: bool = True,
        timeout_s: float | None = None,
        logprobs: bool = True,
    ) -> None:
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        self._runner = asyncio.Runner()
        self._http = httpx2.AsyncClient(timeout=timeout_s, limits=limits, trust_env=proxies)
        self._client = ChatClient(url, api_key=api_key, http=self._http)
        self.url = self._client.url
        self._logprobs = logprobs
        self.ignore_eos = True
        try:
            self.model = model or self._runner.run(self._client.model())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the connections."""
        self._runner.run(self._http.aclose())
        self._runner.close()

    def run(
        self,
        questions: Sequence[Question],
        output_tokens: int,
        *,
        at_a_time: int | None = None,
        arrivals: Sequence[float] | None = None,
    ) -> Round:
        """Send all: `at_a_time` (None: however many), each no sooner than it arrives, in seconds. Answers are exactly
        `output_tokens` long, greedy. ServerError where nothing is answered."""
        return self._runner.run(self._run(questions, output_tokens, at_a_time, arrivals or [0.0] * len(questions)))

    async def _run(
        self, questions: Sequence[Question], output_tokens: int, at_a_time: int | None, arrivals: Sequence[float]
    ) -> Round:
        gate = asyncio.Semaphore(at_a_time or len(questions))

        async def one(number: int, messages: object, after_s: float) -> Timing | str:
            await asyncio.sleep(after_s)
            async with gate:
                try:
                    return replace(await self._ask(messages, output_tokens), number=number)
                except ServerError as error:
                    return str(error)

        conversations = [question.messages() for question in questions]
        started = time.perf_counter()
        answers = await asyncio.gather(*map(one, range(len(questions)), conversations, arrivals))
        wall_s = time.perf_counter() - started
        timings = tuple(answer for answer in answers if isinstance(answer, Timing))
        failures = tuple(answer for answer in answers if isinstance(answer, str))
        if not timings:
            raise ServerError(f"no answer from {self.url}: {failures[0]}")
        return Round(timings=timings, failures=failures, wall_s=wall_s)

    async def _ask(self, messages: object, output_tokens: int) -> Timing:
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if self.ignore_eos else {}),
            **({"logprobs": True} if self._logprobs else {}),
        }
        started = time.perf_counter()
        times: list[float] = []
        usage: dict[str, int] = {}
        text = ""
        async with aclosing(self._client.stream(body)) as chunks:
            async for chunk in chunks:
                for choice in chunk.get("choices") or ():
                    delta = choice.get("delta") or {}
                    words = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
                    if choice.get("logprobs") or words:
                        times.append(time.perf_counter())
                    text += words
                usage = chunk.get("usage") or usage
        ended = time.perf_counter()
        if not times:
            raise ServerError("an answer without any text came")
        return Timing(
            ttft_s=times[0] - started,
            total_s=ended - started,
            tokens=usage.get("completion_tokens", len(times)),
            text=text,
            gaps_s=tuple(after - before for before, after in pairwise(times)),
            prompt_tokens=usage.get("prompt_tokens", 0),
        )
