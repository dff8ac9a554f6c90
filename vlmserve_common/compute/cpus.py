"""How many CPU cores this process may really use."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def available_cpus(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """The cores of this process's affinity, or of its container's CPU quota (cgroup v2) rounded up: the fewer.

    A container on a large machine that may use 2 cores' time would otherwise start a thread for every core it sees.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = cpu_max.read_text(encoding="ascii").split()
        if quota != "max":
            cores = min(cores, -(-int(quota) // int(period)))
    return max(1, cores)
