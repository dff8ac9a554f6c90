"""Log lines that strangers can cause as often as they like come once in a while only."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable


class OnceInAWhile(logging.Filter):
    """Lets a message through once in `interval_s` seconds; the next one tells how many there were. clock: in seconds.

    Messages are told apart by their texts before values are put in.
    """

    def __init__(self, interval_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._interval_s = interval_s
        self._clock = clock
        self._seen: dict[str, tuple[float, int]] = {}  # when it came last, and how many were held back since

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether it comes."""
        text, now = str(record.msg).partition("\n")[0], self._clock()  # asyncio's goes on with what differs
        last, held = self._seen.get(text, (None, 0))
        if last is not None and now - last < self._interval_s:
            self._seen[text] = (last, held + 1)
            return False
        self._seen[text] = (now, 0)
        if held:
            record.msg = f"{record.msg} ({held} more such lines were left out)"
        return True
