"""Who is next where media are decoded: short work before long, clients in turns, and clips never in all places."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

BYTES_PER_S = 2e7
"""Where costs are bytes of files: so many of an ordinary picture are decoded and resized in a second."""


@dataclass(eq=False, kw_only=True, slots=True)
class _Waiting:
    """due: the work that had been let in when this came, and this: what comes later is before it only if that is less,
    so that nothing waits for ever."""

    client: str
    clip: bool
    cost: float
    due: float
    let_in: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class Turns:
    """Places for work on media, given in one event loop. places: how many. Clips leave one of several to pictures.

    Among clients, who had least is first: a client's share is the cost of what was let in for him, and begins with that
    of the one whose turn it is. Small files that take long are not cheap: what they took beyond their cost is added
    when they are done, at `cost_per_s` for a second by `clock`. Among the work of clients of equal shares, or of one
    client, see `_Waiting`.
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
        """Wait for a place, and have it. cost: more than 0. Whoever is cancelled while he waits had none."""
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
