"""Clients of a soak: they ask, read, and leave where they are told to."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable

import httpx2

from vlmserve.commands.bench.soak_requests import FILES, SoakRequest

PATIENCE_S = 120.0
_PIECE = 4096


class SoakClients:
    """Send the requests of a mix to a server, so many at a time.

    outcomes: how many requests of a kind ended how. wrong: the first answers that should not have come.
    """

    def __init__(self, url: str, request: Callable[[int], SoakRequest], *, at_a_time: int) -> None:
        self._url = url
        self._request = request
        self._at_a_time = at_a_time
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.wrong: list[str] = []

    @property
    def cut_off(self) -> int:
        """Requests whose clients left before they had the whole answer."""
        return sum(count for (_, outcome), count in self.outcomes.items() if outcome.startswith("cut off"))

    async def run(self, numbers: range) -> None:
        """Send the requests of these numbers; returns when all have ended and all connections are closed."""
        left = iter(numbers)
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=self._at_a_time)
        async with httpx2.AsyncClient(base_url=self._url, timeout=None, limits=limits, trust_env=False) as http:

            async def client() -> None:
                for number in left:
                    await self._one(http, self._request(number))

            async with asyncio.TaskGroup() as group:
                for _ in range(self._at_a_time):
                    group.create_task(client())

    async def _one(self, http: httpx2.AsyncClient, request: SoakRequest) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                outcome = await _ask(http, request)
        except TimeoutError:
            outcome = f"no answer in {PATIENCE_S:g} s"
        except httpx2.HTTPError as error:
            outcome = f"{type(error).__name__}: {error}"
        self.outcomes[request.kind, outcome.partition(": ")[0]] += 1
        right = outcome.startswith("cut off") or outcome in map(str, request.statuses)
        if not right and len(self.wrong) < 20:
            self.wrong.append(f"request {request.number}, {request.kind}: {outcome}")


class _LeftError(Exception):
    """The client left."""


async def _ask(http: httpx2.AsyncClient, request: SoakRequest) -> str:
    """The answer's status, with its text if that is an error; or that, and where, the client left."""
    cut = request.cut
    try:
        async with asyncio.timeout(cut.after_s if cut else None):
            return await _answer(http, request)
    except (TimeoutError, _LeftError):
        if cut is None:
            raise
        return f"cut off {cut}"


async def _answer(http: httpx2.AsyncClient, request: SoakRequest) -> str:
    headers = {**request.headers, "Content-Length": str(len(request.body))}
    async with http.stream("POST", request.path, content=_body(request), headers=headers) as response:
        events = request.cut.events if request.cut and response.status_code == 200 else None
        if events is not None:
            async for line in response.aiter_lines():
                events -= line.startswith("data:")
                if events <= 0:
                    raise _LeftError
        content = await response.aread() if not response.is_stream_consumed else b""
        status = response.status_code
    if request.path == FILES and status == 200:
        name = response.json()["id"]
        deleted = await http.delete(f"{FILES}/{name}", headers=dict(request.headers))
        return str(deleted.status_code)
    return str(status) if status in request.statuses else f"{status}: {content[:300].decode(errors='replace')}"


async def _body(request: SoakRequest) -> AsyncIterator[bytes]:
    """In pieces, as many as are sent."""
    cut = request.cut
    leaves = cut is not None and cut.body is not None
    end = int(len(request.body) * cut.body) if cut is not None and cut.body is not None else len(request.body)
    for at in range(0, end, _PIECE):
        yield request.body[at : min(at + _PIECE, end)]
    if leaves:
        raise _LeftError
