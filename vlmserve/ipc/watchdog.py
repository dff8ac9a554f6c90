"""Finds processes of a server that hang or were stopped.

There are two signs. A process hangs if its loop is at the same turn for too long, by its `Heartbeat`. A process that
the kernel shows as stopped (SIGSTOP, a debugger) does nothing at all. An idle process is well, however long it sleeps.

Time is counted in looks, not by the clock. If this process did not run (a suspended machine, a frozen container), no
other process ran either, and none is taken for hung.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vlmserve.ipc.channels import Heartbeat
from vlmserve_common.process.child import is_stopped_by_a_signal

LOOK_S = 1.0
"""How often to look."""
STOPPED_S = 2.0
"""A process that is stopped for this long is reported; a shorter stop may be a debugger's."""


@dataclass(frozen=True, kw_only=True)
class Watched:
    """A process to look at. title: what errors call it ("the scheduler process")."""

    title: str
    pid: int
    heartbeat: Heartbeat


@dataclass(slots=True)
class _Seen:
    """The result of all looks at a process so far, in seconds."""

    turn: int = 0
    at_turn_s: float = 0.0
    stopped_s: float = 0.0


class Watchdog:
    """Call `look` every `LOOK_S`.

    timeout_s: after one turn or one stop of this length a process is given up; 0: never. clock: in seconds.
    suspend: called with the reason why requests cannot be answered now, and with None once they can. give_up: called
    once, with the process that is given up, and the reason.
    """

    def __init__(
        self,
        watched: Sequence[Watched],
        *,
        timeout_s: float,
        clock: Callable[[], float],
        suspend: Callable[[str | None], None],
        give_up: Callable[[Watched, str], None],
        is_stopped: Callable[[int], bool] | None = None,
    ) -> None:
        self._watched = [(one, _Seen()) for one in watched]
        self._timeout_s = timeout_s
        self._clock = clock
        self._suspend = suspend
        self._give_up = give_up
        self._is_stopped = is_stopped or is_stopped_by_a_signal
        self._last_look = clock()
        self._problem: str | None = None
        self._gave_up = False

    @property
    def problem(self) -> str | None:
        """Return why requests cannot be answered, as of the last look; None if they can."""
        return self._problem

    def look(self) -> None:
        """Look at every process."""
        if self._gave_up:
            return
        now = self._clock()
        passed = min(now - self._last_look, 2 * LOOK_S)
        self._last_look = now
        problem = None
        for one, seen in self._watched:
            self._update(one, seen, passed)
            if self._timeout_s and max(seen.at_turn_s, seen.stopped_s) >= self._timeout_s:
                self._gave_up = True
                self._give_up(one, self._reason(one, seen))
                return
            if seen.stopped_s >= STOPPED_S:
                problem = problem or f"{one.title} is stopped (SIGSTOP); it goes on after SIGCONT"
        if problem != self._problem:
            self._problem = problem
            self._suspend(problem)

    def _update(self, one: Watched, seen: _Seen, passed: float) -> None:
        turn = one.heartbeat.look()
        seen.at_turn_s = seen.at_turn_s + passed if turn > 0 and turn == seen.turn else 0.0
        seen.turn = turn
        seen.stopped_s = seen.stopped_s + passed if self._is_stopped(one.pid) else 0.0

    def _reason(self, one: Watched, seen: _Seen) -> str:
        if seen.stopped_s >= self._timeout_s:
            return f"{one.title} was stopped for {self._timeout_s:g} s (setting --watchdog-timeout-s)"
        return f"{one.title} was at one step for {self._timeout_s:g} s (setting --watchdog-timeout-s)"
