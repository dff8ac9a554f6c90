"""Counts the CPU cores that this process may really use."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
from pathlib import Path

log = logging.getLogger(__name__)


def available_cpus(cpu_max: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the cores of this process's affinity, or its container's CPU quota (cgroup v2) rounded up, if that is
    less.

    A container on a large machine that may use 2 cores' time would otherwise start a thread for every core it sees.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = cpu_max.read_text(encoding="ascii").split()
        if quota != "max":
            cores = min(cores, -(-int(quota) // int(period)))
    return max(1, cores)


def usable_threads(wanted: int | None, setting: str) -> int:
    """Return how many threads compute: by default as many as there are cores, and never more, since threads would wait
    for one another. setting: the name of the setting of `wanted`."""
    cores = available_cpus()
    if wanted is None:
        return cores
    if wanted > cores:
        log.warning("%s is %d; %d are used, for so many cores are available", setting, wanted, cores)
    return min(wanted, cores)


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the CPU's name, or its architecture if the name is not known."""
    with contextlib.suppress(OSError):
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
