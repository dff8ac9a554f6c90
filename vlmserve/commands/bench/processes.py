"""Memory and CPU time of processes (Linux)."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

MIB = 1024 * 1024


def tree_memory(pid: int, field: str) -> int:
    """Bytes summed over a process and its descendants: VmHWM is each one's peak, VmRSS what it holds now."""
    return sum(process_memory(one, field) for one in [pid, *children_of(pid)])


def children_of(pid: int) -> list[int]:
    """All descendants of a process (Linux)."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *children_of(int(child))]
    return found


def process_memory(pid: int, field: str) -> int:
    """A field of /proc/PID/status in bytes; 0 where there is none."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return 0


def cpu_time(pid: int) -> float:
    """Seconds of CPU time that a process has taken, all its threads together (Linux)."""
    return time.clock_gettime((~pid << 3) | 2)  # clock_getcpuclockid(3)
