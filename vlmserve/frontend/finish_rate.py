"""How long it takes until there is room again, from how fast answers end now."""

from __future__ import annotations

import math
from collections import deque

_REMEMBERED = 64
_LONGEST_S = 3600


class FinishRate:
    """Notes when answers end; all times are of one clock, in seconds. Idle times do not count: see `begin`."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=_REMEMBERED)
        self._since = 0.0

    def begin(self, now: float) -> None:
        """There is something to do after a time with nothing: rates of before tell nothing."""
        self._ends.clear()
        self._since = now

    def note(self, now: float) -> None:
        """An answer has ended."""
        if len(self._ends) == _REMEMBERED:
            self._since = self._ends[0]
        self._ends.append(now)

    def seconds_for(self, answers: int, now: float) -> int:
        """About how long it takes until so many have ended: whole seconds, at least 1, at most an hour.

        Where none has ended yet, the first is expected to take as long again as all have taken so far.
        """
        seconds = answers * (now - self._since) / max(1, len(self._ends))
        return min(max(1, math.ceil(seconds)), _LONGEST_S)
