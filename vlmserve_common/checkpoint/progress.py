"""Tells how far the reading of a large checkpoint has come."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger(__name__)

_GB = 1e9
_EVERY_S = 5.0


class Progress:
    """A line in the log every few seconds while `total` bytes are read, and one at the end if there were any or it was
    a gigabyte. clock: seconds."""

    def __init__(self, total: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._clock = clock
        self._read = 0
        self._begun = self._told = clock()

    def add(self, count: int) -> None:
        """So many bytes more."""
        self._read += count
        now = self._clock()
        if now - self._told >= _EVERY_S:
            self._told = now
            log.info("weights: %.1f of %.1f GB, %s", self._read / _GB, self._total / _GB, self._rate(now))

    def end(self) -> None:
        """All is read, and where it should be."""
        now = self._clock()
        if self._told > self._begun or self._total >= _GB:
            log.info("weights: %.1f GB in %.1f s, %s", self._total / _GB, now - self._begun, self._rate(now))

    def _rate(self, now: float) -> str:
        return f"{self._read / _GB / max(now - self._begun, 1e-9):.2f} GB/s"
