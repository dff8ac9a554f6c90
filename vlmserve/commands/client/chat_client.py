"""The server's API, as far as a chat needs it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, nullcontext
from typing import Any

import httpx2

from vlmserve.commands.client.answer import Answer, read_answer
from vlmserve_common.errors import VlmserveError

_CONNECT_TIMEOUT_S = 10.0
_TIMEOUT = httpx2.Timeout(None, connect=_CONNECT_TIMEOUT_S)  # how long an answer takes is the server's affair


class ServerError(VlmserveError):
    """The server refuses, fails or cannot be reached; the message is its own where there is one."""


class ChatClient:
    """Talks to one server. url: http://host:port, with or without /v1.

    http: keeps the connections of one event loop, and is its owner's to close; without it there is a connection for
    each request, from any number of event loops.
    """

    def __init__(self, url: str, *, api_key: str | None = None, http: httpx2.AsyncClient | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = http

    async def model(self) -> str:
        """The name of the (first) model served there. Raises ServerError."""
        async with self._request("GET", "/models") as response:
            content = await response.aread()
        try:
            name = json.loads(content)["data"][0]["id"]
        except (ValueError, LookupError, TypeError):
            raise ServerError(f"{self.url}/v1/models does not answer as OpenAI's API does") from None
        return str(name)

    async def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a streamed answer. Raises ServerError. Closing it ends the request on the server, too."""
        async with self._request("POST", "/chat/completions", body) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise ServerError(_told(chunk) or "the answer broke off")
                yield chunk

    async def ask(self, body: Mapping[str, Any]) -> AsyncGenerator[Answer, None]:
        """The answer after each piece of text, see `read_answer`. Raises ServerError, and ends as `stream` does."""
        async with aclosing(self.stream(body)) as chunks, aclosing(read_answer(chunks)) as answers:
            async for answer in answers:
                yield answer

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> AsyncIterator[httpx2.Response]:
        try:
            async with (
                nullcontext(self._http) if self._http else httpx2.AsyncClient(timeout=_TIMEOUT) as client,
                client.stream(method, f"{self.url}/v1{path}", json=body, headers=self._headers) as response,
            ):
                if response.status_code != 200:
                    raise ServerError(_refusal(response.status_code, await response.aread()))
                yield response
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise ServerError(f"no answer from {self.url}/v1: {str(error) or type(error).__name__}") from None


def _refusal(status: int, content: bytes) -> str:
    try:
        message = _told(json.loads(content))
    except ValueError:
        message = None
    return message or f"the server answers with HTTP status {status}"


def _told(answer: Any) -> str | None:
    error = answer.get("error") if isinstance(answer, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) and message else None
