"""A client that loads an OpenAI-compatible server with questions, and times each answer."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import pairwise

import httpx2

from vlmserve.commands.bench.media import Question
from vlmserve.commands.client.chat_client import ChatClient, ServerError


@dataclass(frozen=True, kw_only=True)
class Answered:
    """One answer.

    `ttft_s` and `total_s` are seconds from sending the request to the first token and to the end. `gaps_s` are seconds
    between the chunks that brought tokens. `prompt_tokens` are counted by the server. `number` is the question's place.
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
        """The mean seconds between tokens after the first."""
        return (self.total_s - self.ttft_s) / max(self.tokens - 1, 1)


_PARTS = {"encoding": "encode_seconds", "prompts": "prefill_seconds", "decoding": "decode_seconds"}


@dataclass(frozen=True, kw_only=True)
class EngineWork:
    """What the engine did meanwhile. batch: the mean requests of a decode step. shares: of the time, by what was done;
    the rest of it is "neither"."""

    batch: float
    shares: Mapping[str, float]

    @classmethod
    def between(cls, before: Mapping[str, float], after: Mapping[str, float], wall_s: float) -> EngineWork | None:
        """Return the work between two readings of /metrics; None of a server that does not tell."""
        if "decode_steps" not in before or "decode_steps" not in after:
            return None
        grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
        shares = {part: grown[name] / wall_s for part, name in _PARTS.items()}
        shares["neither"] = max(0.0, 1.0 - sum(shares.values()))
        return cls(batch=grown["decode_requests"] / max(grown["decode_steps"], 1.0), shares=shares)

    def __str__(self) -> str:
        shares = ", ".join(f"{part} {share:.0%}" for part, share in self.shares.items())
        return f"decode steps of {self.batch:.1f} requests; {shares} of the time"


@dataclass(frozen=True, kw_only=True)
class Round:
    """The answers to several requests, and the error texts of those that failed.

    wall_s: seconds from the first request sent to the last one answered. work: None of a server that does not tell.
    """

    answers: tuple[Answered, ...]
    failures: tuple[str, ...] = ()
    wall_s: float
    work: EngineWork | None = None

    @property
    def tokens_per_s(self) -> float:
        """The output tokens a second over all requests."""
        return sum(t.tokens for t in self.answers) / self.wall_s


class LoadClient:
    """A client of one server; to be closed. model: its name there, None for the first model listed.

    `proxies` uses those of the environment. `timeout_s` is for a connection, and between two pieces of an answer; None
    waits for ever. `logprobs` asks for log probabilities, so that a token comes at once even if its text is held back.
    Not every server has them. `ignore_eos` may be set to False for a server that refuses this field; answers may then
    be shorter than asked for.
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
        self._key = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._logprobs = logprobs
        self.ignore_eos = True
        try:
            self.model = model or self._runner.run(self._client.model())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connections."""
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
        """Ask all questions and return the answers, which are greedy and exactly `output_tokens` long.

        at_a_time: requests under way at the most; None for no limit. arrivals: when each is sent, in seconds. Raises
        ServerError if no question is answered.
        """
        gate = asyncio.Semaphore(at_a_time or len(questions))

        async def one(number: int, messages: object, after_s: float) -> Answered | str:
            await asyncio.sleep(after_s)
            async with gate:
                try:
                    return replace(await self._ask(messages, output_tokens), number=number)
                except ServerError as error:
                    return str(error)

        async def every() -> list[Answered | str]:
            return await asyncio.gather(*map(one, range(len(questions)), conversations, delays))

        delays = arrivals or [0.0] * len(questions)
        conversations = [question.messages() for question in questions]
        before = self._runner.run(self._metrics())
        started = time.perf_counter()
        found = self._runner.run(every())
        wall_s = time.perf_counter() - started
        work = EngineWork.between(before, self._runner.run(self._metrics()), wall_s)
        answers = tuple(one for one in found if isinstance(one, Answered))
        failures = tuple(one for one in found if isinstance(one, str))
        if not answers:
            raise ServerError(f"no answer from {self.url}: {failures[0]}")
        return Round(answers=answers, failures=failures, wall_s=wall_s, work=work)

    async def _metrics(self) -> dict[str, float]:
        """Return the counters of `vlmserve` on /metrics by name; none of another server."""
        try:
            answer = await self._http.get(f"{self.url.removesuffix('/v1')}/metrics", headers=self._key)
        except httpx2.HTTPError:
            return {}
        lines = re.findall(r"^vlmserve:(\w+)_total(?:\{[^}]*\})? (\S+)$", answer.text, re.MULTILINE)
        return {name: float(value) for name, value in lines}

    async def _ask(self, messages: object, output_tokens: int) -> Answered:
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
        return Answered(
            ttft_s=times[0] - started,
            total_s=ended - started,
            tokens=usage.get("completion_tokens", len(times)),
            text=text,
            gaps_s=tuple(after - before for before, after in pairwise(times)),
            prompt_tokens=usage.get("prompt_tokens", 0),
        )
