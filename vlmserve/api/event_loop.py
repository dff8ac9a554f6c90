"""The event loop of the API process, which knows how long its turns take.

In one turn the loop runs everything that has come since the last. While it runs, nobody else is answered, so a turn
has to be short: a few connections at a time, a few kilobytes of each (`http_server`), and nothing long in the loop.
"""

from __future__ import annotations

import asyncio
import math
import selectors
import time
from collections.abc import Callable

_READY_AT_A_TIME = 64  # fewer make more turns, and each wakes threads and sends messages of its own
_WINDOW_S = 30.0

Ready = list[tuple[selectors.SelectorKey, int]]


class TurnSelector(selectors.DefaultSelector):
    """Hands the loop a few ready connections at a time, and measures the loop's turns. clock: in seconds.

    longest_s: the longest turn of the last 30 to 60 seconds. A turn begins when the loop should have woken, so a thread
    that holds the interpreter makes it longer.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._left: Ready = []
        self.forget()

    @property
    def longest_s(self) -> float:
        return max(self._longest_s, self._longest_before_s)

    def forget(self) -> None:
        """Forget the turns so far, and this one."""
        self._began = math.inf
        self._window_ends, self._longest_s, self._longest_before_s = self._clock() + _WINDOW_S, 0.0, 0.0

    def select(self, timeout: float | None = None) -> Ready:
        """Return the next ready connections, of which there may be more."""
        asked = self._clock()
        if asked > self._window_ends:
            self._window_ends, self._longest_before_s, self._longest_s = asked + _WINDOW_S, self._longest_s, 0.0
        if asked - self._began > self._longest_s:
            self._longest_s = asked - self._began
        if self._left:
            known = self.get_map()  # one that was left may have been closed, or changed, by those before
            ready = [(key, events) for key, events in self._left if known.get(key.fd) is key]
        else:
            ready = super().select(timeout)
        self._left = ready[_READY_AT_A_TIME:]
        woken = self._clock()
        due = woken if timeout is None else asked + timeout
        self._began = due if asked < due < woken else woken
        return ready[:_READY_AT_A_TIME] if self._left else ready


class ApiEventLoop(asyncio.SelectorEventLoop):
    """asyncio's loop, with the selector above. clock: in seconds, for the turns."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.turns = TurnSelector(clock)
        super().__init__(self.turns)


def longest_turn_s() -> float:
    """Return the longest turn that the running loop took of late; 0 for a loop of another kind."""
    loop = asyncio.get_running_loop()
    return loop.turns.longest_s if isinstance(loop, ApiEventLoop) else 0.0


def forget_turns() -> None:
    """Forget the turns of the running loop, this one included."""
    loop = asyncio.get_running_loop()
    if isinstance(loop, ApiEventLoop):
        loop.turns.forget()
