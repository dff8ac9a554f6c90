"""A client of the server's API, as far as commands need it: questions go out, answers come in pieces, or vectors."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import httpx2
import numpy as np

from vlmserve_common.errors import VlmserveError

CONNECT_TIMEOUT_S = 10.0
_TIMEOUT = httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S)  # the server decides how long an answer takes


class ServerError(VlmserveError):
    """The server refuses, fails or cannot be reached. The message is the server's own if it sent one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stats:
    """The times and token counts of one answer.

    ttft_s, total_s: seconds from sending the request to the first text, and to the end. media_tokens: tokens of the
    whole prompt by kind ("image", "video"). prepare_s, first_token_s: the server's own `timings`, None if it sends
    none.
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
        """Return the stages of the request in order, with their seconds, which add up to total_s."""
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
        """Return the rate after the first token; None if there is nothing to measure."""
        seconds = self.total_s - self.ttft_s
        return (self.completion_tokens - 1) / seconds if self.completion_tokens > 1 and seconds > 0 else None


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatAnswer:
    """An answer so far. stats: None until the answer is complete.

    media: the server's report on each medium of the prompt, in order. notes: sentences for the user.
    """

    text: str
    stats: Stats | None = None
    media: tuple[Mapping[str, Any], ...] = ()
    notes: tuple[str, ...] = ()


class ChatClient:
    """Talks to one server. url: http://host:port, with or without /v1.

    http: a client whose connections are reused in one event loop. Its owner closes it. Without it, each request has a
    connection of its own and may come from any event loop.
    """

    def __init__(self, url: str, *, api_key: str | None = None, http: httpx2.AsyncClient | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = http

    async def model(self) -> str:
        """Return the name of the first model that the server lists. Raises ServerError."""
        return (await self.models())[0]

    async def models(self) -> list[str]:
        """Return the names of the models and adapters that the server lists, at least one. Raises ServerError."""
        async with self._request("GET", "/v1/models") as response:
            content = await response.aread()
        try:
            first, *others = (str(model["id"]) for model in json.loads(content)["data"])
        except (ValueError, LookupError, TypeError):
            raise ServerError(f"{self.url}/v1/models does not answer as OpenAI's API does") from None
        return [first, *others]

    async def defaults(self) -> Mapping[str, Any]:
        """Return the server's values of options that a request leaves out, and "max_model_len": the longest request.

        Empty if the server does not tell them.
        """
        try:
            async with self._request("GET", "/server_info") as response:
                told = json_or_none(await response.aread())
            return {**told["defaults"], "max_model_len": told["max_model_len"]}
        except (ServerError, LookupError, TypeError):
            return {}

    async def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the chunks of a streamed answer. Raises ServerError. Closing the generator ends the request."""
        async with aclosing(self.events("/v1/chat/completions", body)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON of an answer. Raises ServerError."""
        async with self._request(method, path, body) as response:
            return json_or_none(await response.aread())

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of a stream. Raises ServerError. Closing the generator ends the request."""
        async with self._request("POST", path, body) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise ServerError(error_in(chunk).get("message") or "the answer broke off")
                yield chunk

    async def ask(self, body: Mapping[str, Any]) -> AsyncGenerator[ChatAnswer, None]:
        """Yield the answer after each piece, see `read_answer`. Raises ServerError; closing ends the request."""
        async with aclosing(self.stream(body)) as chunks, aclosing(read_answer(chunks)) as answers:
            async for answer in answers:
                yield answer

    async def embed(self, model: str, messages: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """Return the vector of a conversation, of length 1: float32 [dimensions]. Raises ServerError."""
        body = {"model": model, "messages": messages, "encoding_format": "float"}
        async with self._request("POST", "/v1/embeddings", body) as response:
            content = await response.aread()
        try:
            row = np.array(json.loads(content)["data"][0]["embedding"], "<f4")
        except (ValueError, LookupError, TypeError):
            raise ServerError(f"{self.url}/v1/embeddings does not answer as OpenAI's API does") from None
        return row / max(float(np.linalg.norm(row)), 1e-12)

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> AsyncIterator[httpx2.Response]:
        try:
            async with (
                nullcontext(self._http) if self._http else httpx2.AsyncClient(timeout=_TIMEOUT) as client,
                client.stream(method, f"{self.url}{path}", json=body, headers=self.headers) as response,
            ):
                if response.status_code != 200:
                    told = error_in(json_or_none(await response.aread())).get("message")
                    raise ServerError(told or f"the server answers with HTTP status {response.status_code}")
                yield response
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise ServerError(f"no answer from {self.url}/v1: {str(error) or type(error).__name__}") from None


async def read_answer(
    chunks: AsyncIterator[Mapping[str, Any]], clock: Callable[[], float] = time.perf_counter
) -> AsyncGenerator[ChatAnswer, None]:
    """Yield the answer after each piece of text, and at the end the complete one.

    chunks: of a request that is sent at this moment, with usage. clock: seconds.
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
                yield ChatAnswer(text=text)
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
    yield ChatAnswer(text=text, stats=stats, media=media, notes=(*notes, *last.get("warnings", ())))


def json_or_none(content: bytes) -> Any:
    """Return the value of JSON text; None for anything else."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


def error_in(body: Any) -> Mapping[str, Any]:
    """Return the error object of an answer. Servers also send it as the whole body, or as text. Empty if there is none.

    Its "message", "code", "param" and "type" are text if they are there.
    """
    if not isinstance(body, dict):
        return {}
    found = body.get("error", body.get("detail", body if "message" in body else None))
    if not isinstance(found, dict):
        return {"message": found if isinstance(found, str) else json.dumps(found)} if found else {}
    return {
        name: value
        for name, value in found.items()
        if name not in ("message", "code", "param", "type") or isinstance(value, str)
    }
