"""The meeting points of a server's processes: socket addresses, a directory for large arrays, and signs of life."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass, replace
from pathlib import Path

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
