"""A server under test, and the memory of its processes."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from vlmserve.client.own_server import OwnServer

MIB = 1024 * 1024


class BenchServer(OwnServer):
    """See `OwnServer`. Its model is called "bench"."""

    model = "bench"

    def __init__(self, model: Path, flags: Sequence[str] = (), *, startup_timeout_s: float = 600.0) -> None:
        words = [str(model), "--served-model-name", self.model, "--log-level", "warning", *flags]
        super().__init__(words, startup_timeout_s=startup_timeout_s)

    def memory(self, field: str = "VmHWM") -> int:
        """Bytes summed over the server's processes: VmHWM is each one's peak, VmRSS what it holds now."""
        return sum(process_memory(pid, field) for pid in [self.pid, *children_of(self.pid)])


def children_of(pid: int) -> list[int]:
    """All descendants of a process (Linux)."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *children_of(int(child))]
    return found


def process_memory(pid: int, field: str) -> int:
    """A field of /proc/PID/status in bytes; 0 where there is none."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def cpu_time(pid: int) -> float:
    """Seconds of CPU time that a process has taken, all its threads together (Linux)."""
    return time.clock_gettime((~pid << 3) | 2)  # clock_getcpuclockid(3)


def own_peak_memory() -> int:
    """This process's peak memory in bytes."""
    return process_memory(os.getpid(), "VmHWM")
