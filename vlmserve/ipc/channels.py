"""The meeting points of a server's processes: socket addresses, a directory for large arrays, and signs of life.

Processes that hang or were stopped are found by two signs. A process hangs if its loop is at the same turn for too
long, by its `Heartbeat`. A process that the kernel shows as stopped (SIGSTOP, a debugger) does nothing at all. An idle
process is well, however long it sleeps.

Time is counted in looks, not by the clock. If this process did not run (a suspended machine, a frozen container), no
other process ran either, and none is taken for hung.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vlmserve_common.process.child import is_stopped_by_a_signal
from vlmserve_common.transport.shm import SharedArrays


@dataclass(frozen=True, kw_only=True)
class Channels:
    """The addresses of one engine's processes. Each address is bound by the process it is named after. Any number of
    senders may use it.

    scheduler: takes `SchedulerInput`, from the API process and the detokenizer.
    detokenizer: takes `DetokenizerInput`, from the scheduler.
    api: takes `TokenizerManagerInput`, from the detokenizer.
    control: bound by the scheduler; takes `ControlRequest`, from the API process, and answers each.
    runtime_dir: where the sockets are, and heartbeats; a replica's own.
    shared_dir: where `SharedArrays` puts arrays that are too large for a socket.
    replica: the engine's number; None for a single engine.
    """

    scheduler: str
    detokenizer: str
    api: str
    control: str
    runtime_dir: str
    shared_dir: str
    replica: int | None = None

    @classmethod
    def in_directories(cls, runtime_dir: Path, shared_dir: Path) -> Channels:
        """Make the channels of a server whose sockets live in `runtime_dir`, an existing private directory."""
        return cls(
            scheduler=f"ipc://{runtime_dir}/scheduler",
            detokenizer=f"ipc://{runtime_dir}/detokenizer",
            api=f"ipc://{runtime_dir}/api",
            control=f"ipc://{runtime_dir}/control",
            runtime_dir=str(runtime_dir),
            shared_dir=str(shared_dir),
        )

    def replicas(self, count: int) -> list[Channels]:
        """Make the channels of `count` engines, in folders of their own. All have the API process's one address."""
        return [self] if count == 1 else [self._of_replica(replica) for replica in range(count)]

    def _of_replica(self, replica: int) -> Channels:
        folder = Path(self.runtime_dir) / f"r{replica}"
        folder.mkdir(mode=0o700)
        own = Channels.in_directories(folder, Path(self.shared_dir))
        return replace(own, api=self.api, replica=replica)

    def shared_arrays(self, *, mapped: bool = False, spare_bytes: int = 0) -> SharedArrays:
        """Open this process's access to the large arrays."""
        return SharedArrays(Path(self.shared_dir), mapped=mapped, spare_bytes=spare_bytes)

    def heartbeat(self, process: str) -> Heartbeat:
        """Open the sign of life of the process of that name: the process itself beats it, and any process may look."""
        return Heartbeat(Path(self.runtime_dir) / f"{process}.heartbeat")


_BYTES = 8


class Heartbeat:
    """A sign of life in shared memory: the turn that a process's loop is at, or that it waits for work.

    It is one number that only grows in size: the turn at work, or, negative, the last one done. One store writes it and
    one load reads it, so it needs no lock and costs a fraction of a microsecond. `path` is made if it is not there. One
    process beats, any number may look; times are the watcher's business.
    """

    def __init__(self, path: str | Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(fd, _BYTES)
            self._cell = memoryview(mmap.mmap(fd, _BYTES)).cast("q")
        finally:
            os.close(fd)
        self._turn = 0

    def working(self) -> None:
        """Note that the next turn begins."""
        self._turn += 1
        self._cell[0] = self._turn

    def idle(self) -> None:
        """Note that there is nothing to do, for however long."""
        self._cell[0] = -self._turn

    def look(self) -> int:
        """Return the turn at work; 0 or less if there is none."""
        return self._cell[0]


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
