"""How many bytes of files are in memory at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ByteBudget:
    """First come, first served; one that is larger than all there is goes alone. For one event loop."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._held = 0
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def hold(self, size: int) -> AsyncIterator[None]:
        """Wait until `size` bytes are free; they are held inside."""
        size = min(size, self._total)
        async with self._turn:
            while self._held + size > self._total:
                self._freed.clear()
                await self._freed.wait()
            self._held += size
        try:
            yield
        finally:
            self._held -= size
            self._freed.set()
