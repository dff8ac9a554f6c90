"""How many bytes of files are in memory at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ByteBudget:
    """First come, first served; one that is larger than all there is goes alone. For one event loop."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._held = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[None]:
        """Wait until `size` bytes are free; they are held inside."""
        size = min(size, self._total)
        if self._waiting or self._held + size > self._total:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((size, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():  # it was its turn, too
                    self._give_back(size)
                raise
        else:
            self._held += size
        try:
            yield
        finally:
            self._give_back(size)

    def _give_back(self, size: int) -> None:
        self._held -= size
        while self._waiting:
            wanted, turn = self._waiting[0]
            if turn.cancelled():
                self._waiting.popleft()
            elif self._held + wanted <= self._total:
                self._waiting.popleft()
                self._held += wanted
                turn.set_result(None)
            else:
                return
