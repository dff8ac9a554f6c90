"""Whether a machine is quiet enough to measure on: the CPU time that others take meanwhile (Linux)."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection
from pathlib import Path
from urllib.parse import urlsplit

LIMIT_CORES = 0.15
"""Others' part of a quiet machine, in cores."""
_LOCAL = ("localhost", "127.0.0.1", "::1")
_LISTENING = "0A"


class CpuWatch:
    """Cores that were busy since it was made: each server's, with the processes under it, and those of others, this
    process and its own left out. servers: pids."""

    def __init__(self, servers: Collection[int]) -> None:
        self._servers = servers
        self._at = time.perf_counter()
        self._before = _machine_seconds(), _tree_seconds([*servers, os.getpid()])

    def cores(self) -> tuple[dict[int, float], float]:
        """By pid, and of all others."""
        passed = time.perf_counter() - self._at
        trees = _tree_seconds(self._before[1])
        used = {pid: max(0.0, seconds - self._before[1][pid]) for pid, seconds in trees.items()}
        others = max(0.0, _machine_seconds() - self._before[0] - sum(used.values()))
        return {pid: used[pid] / passed for pid in self._servers}, others / passed


def wait_until_quiet(servers: Collection[int], seconds: float, *, step_s: float = 2.0) -> None:
    """Until others took next to nothing for a moment; so many seconds at the most."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        watch = CpuWatch(servers)
        time.sleep(step_s)
        if watch.cores()[1] < LIMIT_CORES:
            return


def server_pid(url: str) -> int | None:
    """The process that listens at a URL; None where that is another machine's, or another user's."""
    parts = urlsplit(url)
    if parts.hostname not in _LOCAL or not Path("/proc/net").exists():
        return None
    sockets = _listening(parts.port or 80)
    parents = {pid: int(fields[1]) for pid, fields in _processes().items()}
    holders = [pid for pid in parents if sockets & _sockets(pid)]
    return next((pid for pid in holders if parents[pid] not in holders), None)


def _listening(port: int) -> set[str]:
    found = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(f"socket:[{fields[9]}]")
    return found


def _sockets(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(os.readlink(fd))
    return found


def _processes() -> dict[int, list[str]]:
    """By pid, what stands behind the name in /proc/PID/stat."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                found[int(entry.name)] = (entry / "stat").read_text().rpartition(")")[2].split()
    return found


def _tree_seconds(roots: Collection[int]) -> dict[int, float]:
    """CPU seconds of each process and those under it, ended ones that were waited for included. A process counts for
    the nearest of the roots above it; one that has ended has none."""
    ticks = os.sysconf("SC_CLK_TCK")
    processes = _processes()
    seconds = dict.fromkeys(roots, 0.0)
    for pid, fields in processes.items():
        above = pid
        while above in processes and above not in seconds:
            above = int(processes[above][1])
        if above in seconds:
            seconds[above] += sum(map(int, fields[11:15])) / ticks
    return seconds


def _machine_seconds() -> float:
    """CPU seconds of the whole machine, with what other machines on its host took from it (steal)."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
