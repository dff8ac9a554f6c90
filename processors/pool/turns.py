"""Decides which medium is decoded next: short work before long, clients in turns, and never clips in all places."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

BYTES_PER_S = 2e7
"""Bytes of an ordinary picture that are decoded and resized in a second. Costs are bytes of files."""


@dataclass(eq=False, kw_only=True, slots=True)
class _Waiting:
    """Work that waits for a place.

    `due`: the total cost let in when this work came, plus its own. Later work goes first only if its sum is smaller, so
    nothing waits forever.
    """

    client: str
    clip: bool
    cost: float
    due: float
    let_in: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Turns:
    """Places for work on media, given in one event loop. `places`: how many. Clips leave one of several places to
    pictures.

    The client with the smallest share is first. A share is the cost of the work let in for the client; it starts at the
    share of the client whose turn it is. A small file can take long: time beyond its cost is added when it is done, at
    `cost_per_s` for each second of `clock`. For equal shares, and within one client, `_Waiting.due` decides.
    """

    def __init__(self, places: int, *, cost_per_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._cost_per_s = cost_per_s
        self._clock = clock
        self._free = places
        self._free_for_clips = max(1, places - 1)
        self._waiting: list[_Waiting] = []
        self._shares: dict[str, float] = {}  # those above the least
        self._least_share = 0.0
        self._let_in = 0.0

    @asynccontextmanager
    async def turn(self, *, cost: float, clip: bool = False, client: str = "") -> AsyncIterator[None]:
        """Wait for a place, and hold it. `cost`: more than 0. Cancelling the wait gives up the request for a place."""
        one = _Waiting(client=client, clip=clip, cost=cost, due=self._let_in + cost)
        self._waiting.append(one)
        self._go_on()
        begun = None
        try:
            await one.let_in
            begun = self._clock()
            yield
        finally:
            if one in self._waiting:
                self._waiting.remove(one)
            else:
                took = 0.0 if begun is None else self._cost_per_s * (self._clock() - begun)
                if took > cost:
                    self._shares[client] = self._share(one) + took - cost
                self._free += 1
                self._free_for_clips += one.clip
            self._go_on()

    def _go_on(self) -> None:
        """Let in as many as there are places for."""
        while able := [one for one in self._waiting if self._free and self._fits(one)]:
            first = min(able, key=lambda one: (self._share(one), one.due))
            self._waiting.remove(first)
            self._free -= 1
            self._free_for_clips -= first.clip
            self._least_share = self._share(first)
            self._shares[first.client] = self._least_share + first.cost
            self._shares = {client: share for client, share in self._shares.items() if share > self._least_share}
            self._let_in += first.cost
            first.let_in.set_result(None)

    def _fits(self, one: _Waiting) -> bool:
        return not one.let_in.cancelled() and (not one.clip or self._free_for_clips > 0)

    def _share(self, one: _Waiting) -> float:
        return max(self._least_share, self._shares.get(one.client, 0.0))
