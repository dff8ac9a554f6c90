"""A sign of life in shared memory: which turn a process's loop is at, or that it waits for work.

One number that only grows in size: the turn at work, or, negative, the last one done. It is written with one store and
read with one load, so it needs no lock, and costs a fraction of a microsecond. Times are the watcher's business.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

_BYTES = 8


class Heartbeat:
    """Maps `path`, which is made if it is not there. One process beats, any number may look."""

    def __init__(self, path: str | Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, _BYTES)
            self._cell = memoryview(mmap.mmap(fd, _BYTES)).cast("q")
        finally:
            os.close(fd)
        self._turn = 0

    def working(self) -> None:
        """The next turn begins."""
        self._turn += 1
        self._cell[0] = self._turn

    def idle(self) -> None:
        """There is nothing to do, for however long."""
        self._cell[0] = -self._turn

    def look(self) -> int:
        """The turn at work; 0 or less: none is."""
        return self._cell[0]
