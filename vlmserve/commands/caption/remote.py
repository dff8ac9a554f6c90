"""Captions by OpenAI-compatible servers: one, or several that share the requests."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx2

from vlmserve.commands.batch.item import ChatRequest
from vlmserve.commands.caption.run import CaptionStopped
from vlmserve.commands.caption.servers import (
    Away,
    NoAnswer,
    ServerStanding,
    Unfit,
    Verdict,
    choose,
    judge_answer,
    judge_models,
)
from vlmserve.commands.client.chat_client import CONNECT_TIMEOUT_S
from vlmserve.commands.client.media import with_data_urls
from vlmserve.config.checks import SettingsError
from vlmserve_common.errors import BadRequestError, EngineError

logger = logging.getLogger(__name__)

_TRIES = 3  # of a request that may itself make a server fail
_MOST_TIMES_AWAY = 100  # refusals of one request, while servers answer other ones
_RETRY_PAUSES_S = (0.5, 1.0)
_LOOK_TIMEOUT_S = 10.0
_KEEPALIVE_S = 2.0  # less than servers have: a connection must not close just when it is used again
_MOST_ANSWER_BYTES = 64 * 2**20
_MOST_NAMES_SHOWN = 10
_Looked = tuple[str, ...] | Away | Unfit


class RemoteCaptioner:
    """A `Captioner` that asks servers, in one event loop. `start` comes first.

    urls: http://host:port, with or without /v1. model: None takes the one that all servers have. request_timeout_s:
    limit for an answer. server_timeout_s: limit without any working server. clock, sleep: in seconds. Raises
    SettingsError.
    """

    engines = 1
    path = "chat/completions"
    read: Callable[[Any, bytes, int], dict[str, Any] | NoAnswer] | None = None
    """Reads the answers of another endpoint, see `judge_answer`."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        api_key: str | None,
        model: str | None,
        request_timeout_s: float,
        server_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.model = model or ""
        self.identity = ""
        self._servers = [ServerStanding(url) for url in dict.fromkeys(map(_base_url, urls))]
        self._headers = {"Content-Type": "application/json", **_authorization(api_key)}
        self._request_timeout_s = request_timeout_s
        self._server_timeout_s = server_timeout_s
        self._clock = clock
        self._sleep = sleep
        self._client: httpx2.AsyncClient | None = None
        self._numbers = itertools.count()
        self._stopped: str | None = None
        self._changed = asyncio.Event()
        self._returns: dict[ServerStanding, asyncio.Task[None]] = {}
        self._ending: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Look at the servers' models; sets `model` and `identity`. Raises CaptionStopped if no server can be used."""
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEPALIVE_S)
        self._client = httpx2.AsyncClient(
            timeout=httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S), limits=limits, follow_redirects=False
        )
        looked = await asyncio.gather(*map(self._look, self._servers))
        self._choose_model({server.url: found for server, found in zip(self._servers, looked, strict=True)})
        for server, found in zip(self._servers, looked, strict=True):
            if self._stopped is None and not self._admit(server, found) and not server.is_unfit:
                self._leave_out(server, server.reason)
        self._watch()
        while self._stopped is None and not any(server.is_in for server in self._servers):
            await self._changed.wait()
        if self._stopped is not None:
            raise CaptionStopped(self._stopped)

    async def ask(self, request: ChatRequest) -> dict[str, Any]:
        body = await asyncio.to_thread(self.body, request)
        wanted = request.options.get("n") or 1
        number, times_away = next(self._numbers), 0
        tried: list[ServerStanding] = []
        reasons: list[str] = []
        while True:
            server = await self._next_server(tried)
            outcome = await self._try(server, number, body, wanted)
            if isinstance(outcome, dict):
                return outcome
            if isinstance(outcome, BadRequestError):
                raise outcome
            reason = f"{server.url}: {outcome.reason}"
            times_away += isinstance(outcome, Away)
            if times_away == _MOST_TIMES_AWAY:
                raise EngineError(f"no server takes this request, after {times_away} tries; {reason}")
            if isinstance(outcome, NoAnswer):
                tried.append(server)
                reasons.append(reason)
                if len(tried) == _TRIES:
                    raise EngineError(f"no answer in {_TRIES} tries; {'; '.join(dict.fromkeys(reasons))}")
                if not any(other.has_room and other not in tried for other in self._servers):
                    await self._sleep(_RETRY_PAUSES_S[len(tried) - 1])
            server.sent_again += 1

    def notes(self) -> list[str]:
        return [note for server in self._servers if (note := server.note()) is not None]

    async def close(self) -> None:
        tasks = [*self._returns.values(), *([self._ending] if self._ending else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._client is not None:
            await self._client.aclose()

    # ---- one request

    def body(self, request: ChatRequest) -> bytes:
        """Return what is sent for a request."""
        messages = with_data_urls(request.messages)
        return json.dumps({"model": self.model, "messages": messages, **request.options}).encode()

    async def _next_server(self, tried: Sequence[ServerStanding]) -> ServerStanding:
        while True:
            if self._stopped is not None:
                raise CaptionStopped(self._stopped)
            server = choose(self._servers, tried)
            if server is not None:
                return server
            await self._changed.wait()

    async def _try(self, server: ServerStanding, number: int, body: bytes, wanted: int) -> Verdict:
        era, started = server.take(), self._clock()
        try:
            outcome = await self._post(server, body, wanted)
        finally:
            server.release(era)
            self._tell()
        if isinstance(outcome, Unfit) and not outcome.for_good and server.answer_s is not None:
            outcome = NoAnswer(reason=outcome.reason)
        match outcome:
            case dict():
                server.answered(era, self._clock() - started)
            case BadRequestError():
                server.answered(era, None)
            case Away() if server.is_in and era == server.era:
                self._leave_out(server, outcome.reason, at_least_s=outcome.retry_after_s, busy=outcome.busy)
            case NoAnswer() if server.failed(era, number):
                self._leave_out(server, outcome.reason)
            case Unfit():
                self._give_up(server, outcome.reason)
        if isinstance(outcome, dict | BadRequestError) and self._ending is not None:
            self._ending.cancel()
            self._ending = None
        self._watch()
        return outcome

    async def _post(self, server: ServerStanding, body: bytes, wanted: int) -> Verdict:
        try:
            async with asyncio.timeout(self._request_timeout_s):
                answer = await self._exchange("POST", f"{server.url}/{self.path}", body)
        except TimeoutError:
            return NoAnswer(reason=f"no answer in {self._request_timeout_s:g} s (--request-timeout-s)")
        except httpx2.HTTPError as error:
            is_away = isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout | httpx2.ProxyError)
            return (Away if is_away else NoAnswer)(reason=_words(error))
        return judge_answer(*answer, wanted=wanted, read=self.read)

    async def _exchange(self, method: str, url: str, body: bytes | None = None) -> tuple[int, Mapping[str, str], bytes]:
        assert self._client is not None, "not started"
        content = bytearray()
        async with self._client.stream(method, url, content=body, headers=self._headers) as response:
            async for part in response.aiter_bytes():
                content += part
                if len(content) > _MOST_ANSWER_BYTES:
                    raise httpx2.DecodingError(f"an answer of more than {_MOST_ANSWER_BYTES} bytes")
        return response.status_code, response.headers, bytes(content)

    # ---- servers that come and go

    async def _look(self, server: ServerStanding) -> _Looked:
        try:
            async with asyncio.timeout(_LOOK_TIMEOUT_S):
                return judge_models(*await self._exchange("GET", f"{server.url}/models"))
        except TimeoutError:
            return Away(reason=f"no list of its models in {_LOOK_TIMEOUT_S:g} s")
        except httpx2.HTTPError as error:
            return Away(reason=_words(error))

    def _choose_model(self, looked: Mapping[str, _Looked]) -> None:
        """Choose the model that all answering servers have, if none was named."""
        lists = {url: found for url, found in looked.items() if isinstance(found, tuple)}
        if not self.model and lists:
            common = [name for name in next(iter(lists.values())) if all(name in names for names in lists.values())]
            if len(common) == 1:
                self.model = common[0]
            else:
                served = "; ".join(f"{url}: {_listed(names)}" for url, names in lists.items())
                there = "there are" if common else "there is none in common, but"
                self._stop(f"name one model with --model; {there} {served}")
        self.identity = f"server model {self.model}"

    def _admit(self, server: ServerStanding, looked: _Looked) -> bool:
        """Return True if the server has the model. Otherwise its `reason` says why it cannot be used."""
        if isinstance(looked, tuple):
            self._choose_model({server.url: looked})
            if self._stopped is not None:
                return False
            if self.model in looked:
                server.fitted = True
                return True
            looked = Unfit(reason=f"it serves {_listed(looked)}, not {self.model!r} (--model)")
        if isinstance(looked, Unfit) and (looked.for_good or not server.fitted):
            self._give_up(server, looked.reason)
        server.reason = looked.reason
        return False

    def _give_up(self, server: ServerStanding, reason: str) -> None:
        server.reason = reason
        server.is_in, server.is_unfit = False, True
        logger.warning("%s is not used: %s", server.url, reason)
        self._watch()

    def _leave_out(self, server: ServerStanding, reason: str, *, at_least_s: float = 0.0, busy: bool = False) -> None:
        pause_s = server.leave_out(reason, at_least_s=at_least_s, busy=busy)
        level = logging.INFO if busy else logging.WARNING
        logger.log(level, "%s gets nothing for %.3g s: %s", server.url, pause_s, reason)
        if server in self._returns:
            self._returns[server].cancel()
        self._returns[server] = asyncio.create_task(self._bring_back(server, pause_s, busy=busy))

    async def _bring_back(self, server: ServerStanding, pause_s: float, *, busy: bool) -> None:
        await self._sleep(pause_s)
        while not busy and not server.is_unfit and not self._admit(server, await self._look(server)):
            await self._sleep(server.next_pause_s())
        if not server.is_unfit:
            server.is_in = True
            logger.info("%s is back", server.url)
            self._tell()

    def _watch(self) -> None:
        """End the run if no server can ever answer, or none has answered for too long."""
        if all(server.is_unfit for server in self._servers):
            self._stop(f"no server can be used: {self._all_reasons()}")
        elif self._ending is None and not any(server.works for server in self._servers):
            self._ending = asyncio.create_task(self._end())
        self._tell()

    async def _end(self) -> None:
        """End the run after the limit. An answer cancels this."""
        await self._sleep(self._server_timeout_s)
        while any(server.is_in for server in self._servers):  # on trial, perhaps with a request
            await self._changed.wait()
        waited = f"waited {self._server_timeout_s:g} s, --server-timeout-s"
        self._stop(f"no server answers ({waited}): {self._all_reasons()}")

    def _all_reasons(self) -> str:
        return "; ".join(f"{server.url}: {server.reason}" for server in self._servers)

    def _stop(self, message: str) -> None:
        self._stopped = self._stopped or message
        self._tell()

    def _tell(self) -> None:
        """Wake the tasks that wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()


def _base_url(url: str) -> str:
    """Return the URL with a version in it, by default /v1. Raises SettingsError."""
    try:
        parts = urlsplit(url.strip())
        ok = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        ok = False
    if not ok or parts.query or parts.fragment:
        raise SettingsError(f"--base-url {url!r} is not a server's address; it has the form http://host:port/v1")
    if parts.username is not None:
        raise SettingsError("--base-url has a user's name in it; what a server asks for goes into --api-key")
    base = url.strip().rstrip("/")
    return base if re.search(r"/v\d\w*(/|$)", parts.path) else f"{base}/v1"


def _authorization(api_key: str | None) -> dict[str, str]:
    if not api_key:
        return {}
    if not re.fullmatch(r"[!-~]+", api_key):
        raise SettingsError("--api-key has spaces or characters that are not ASCII")
    return {"Authorization": f"Bearer {api_key}"}


def _words(error: Exception) -> str:
    """Describe a connection error for users. Its cause has the words if the error has none."""
    if isinstance(error, httpx2.ConnectTimeout):
        return f"no connection in {CONNECT_TIMEOUT_S:g} s"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        if isinstance(cause, ConnectionError) and cause.errno:
            return os.strerror(cause.errno).lower()
        cause = cause.__cause__ or cause.__context__
    return str(error) or type(error).__name__


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:_MOST_NAMES_SHOWN]))
    return shown if len(names) <= _MOST_NAMES_SHOWN else f"{shown} and {len(names) - _MOST_NAMES_SHOWN} more"
