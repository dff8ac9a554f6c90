"""How much of what was fetched may be in memory at a time, until it is processed."""

from __future__ import annotations

import asyncio
from types import TracebackType

_MIB = 2**20
FREE_BYTES = _MIB
"""Every medium may have that much without asking: what a slow host sends keeps nobody else waiting."""


class MediaMemory:
    """mib: for all media that are larger than `FREE_BYTES`, together."""

    def __init__(self, mib: int) -> None:
        self.mib = self.free = mib
        self.freed = asyncio.Event()
        self.turn = asyncio.Lock()


class Claim:
    """One medium's part of the memory, let go of at the end of a `with` block.

    whole: bytes to take at once for a medium that comes in pieces.
    """

    def __init__(self, memory: MediaMemory) -> None:
        self.whole = 0
        self._memory = memory
        self._taken = 0
        self._lock = asyncio.Lock()

    @property
    def taken(self) -> bool:
        """Whether it has room."""
        return self._taken > 0

    def fits(self, size: int) -> bool:
        """Whether `take` would not wait. Whoever would must not keep what those who have memory may need: a turn."""
        if self.taken or size <= FREE_BYTES:
            return True
        return not self._memory.turn.locked() and self._memory.free >= self._wanted(size)

    async def take(self, size: int) -> None:
        """Wait for room for so many bytes, unless they are few. Once: whoever has some never waits for more, which
        another one could have who waits, too."""
        if size <= FREE_BYTES:
            return
        memory, wanted = self._memory, self._wanted(size)
        async with self._lock:
            if self._taken:
                return
            async with memory.turn:  # nobody else takes what is free now
                while memory.free < wanted:
                    memory.freed.clear()
                    await memory.freed.wait()
                memory.free -= wanted
                self._taken = wanted

    def _wanted(self, size: int) -> int:
        return min(-(-(max(self.whole, size)) // _MIB), self._memory.mib)

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._memory.free += self._taken
        self._memory.freed.set()
        self._taken = 0
