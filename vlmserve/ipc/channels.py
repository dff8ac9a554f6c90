"""Where the processes of one server meet: socket addresses in a private directory, and a directory for large arrays."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass, replace
from pathlib import Path

from vlmserve_common.transport.shm import SharedArrays


@dataclass(frozen=True, kw_only=True)
class Channels:
    """Handed to every child process. Each address is bound by the process it is named after, and takes messages from
    any number of senders.

    scheduler: takes `SchedulerInput`, from the API process and the detokenizer.
    detokenizer: takes `DetokenizerInput`, from the scheduler.
    api: takes `TokenizerManagerInput`, from the detokenizer.
    control: bound by the scheduler; takes `ControlRequest`, from the API process, and answers each.
    runtime_dir: where the sockets are, and heartbeats; a replica's own.
    shared_dir: where `SharedArrays` puts arrays that are too large for a socket.
    replica: which of several engines these are of; None: there is one.
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
        """The channels of a server whose sockets live in `runtime_dir`, an existing private directory."""
        return cls(
            scheduler=f"ipc://{runtime_dir}/scheduler",
            detokenizer=f"ipc://{runtime_dir}/detokenizer",
            api=f"ipc://{runtime_dir}/api",
            control=f"ipc://{runtime_dir}/control",
            runtime_dir=str(runtime_dir),
            shared_dir=str(shared_dir),
        )

    def replicas(self, count: int) -> list[Channels]:
        """Those of each of so many engines, in folders of their own. The API process's address is the same for all."""
        return [self] if count == 1 else [self._of_replica(replica) for replica in range(count)]

    def _of_replica(self, replica: int) -> Channels:
        folder = Path(self.runtime_dir) / f"r{replica}"
        folder.mkdir(mode=0o700)
        own = Channels.in_directories(folder, Path(self.shared_dir))
        return replace(own, api=self.api, replica=replica)

    def shared_arrays(self, *, mapped: bool = False, spare_bytes: int = 0) -> SharedArrays:
        """This process's access to the large arrays."""
        return SharedArrays(Path(self.shared_dir), mapped=mapped, spare_bytes=spare_bytes)

    def heartbeat(self, process: str) -> Heartbeat:
        """The sign of life of a process of that name: for itself, to beat, and for others, to look at."""
        return Heartbeat(Path(self.runtime_dir) / f"{process}.heartbeat")


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
