"""Memory and CPU time of processes, and whether a machine is quiet enough to measure on (Linux)."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from vlmserve_common.errors import EngineError

MIB = 1024 * 1024
LIMIT_CORES = 0.15
"""The cores that other processes may take of a quiet machine."""
_LOCAL = ("localhost", "127.0.0.1", "::1")
_LISTENING = "0A"


def run_python(words: Sequence[str], what: str, timeout_s: float) -> str:
    """Run another Python with these words, and return its output.

    Raises EngineError that begins with `what` if it fails.
    """
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=timeout_s, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise EngineError(f"{what}: {last}")
    return done.stdout


def children_of(pid: int) -> list[int]:
    """Return all descendants of a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *children_of(int(child))]
    return found


def tree_memory(pid: int, field: str) -> int:
    """Sum the bytes of a process and its descendants. field: VmHWM for the peak of each, VmRSS for now."""
    return sum(process_memory(one, field) for one in [pid, *children_of(pid)])


def process_memory(pid: int, field: str) -> int:
    """Return a field of /proc/PID/status in bytes; 0 if there is none."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    return 0


def cpu_time(pid: int) -> float:
    """Return the seconds of CPU time that all threads of a process have taken."""
    return time.clock_gettime((~pid << 3) | 2)  # clock_getcpuclockid(3)


class CpuWatch:
    """The cores that are busy from now on. servers: pids; a server counts with the processes under it.

    This process and its children do not count at all.
    """

    def __init__(self, servers: Collection[int]) -> None:
        self._servers = servers
        self._at = time.perf_counter()
        self._before = _machine_seconds(), _tree_seconds([*servers, os.getpid()])

    def cores(self) -> tuple[dict[int, float], float]:
        """Return the cores of each server, by pid, and those of all other processes."""
        passed = time.perf_counter() - self._at
        trees = _tree_seconds(self._before[1])
        used = {pid: max(0.0, seconds - self._before[1][pid]) for pid, seconds in trees.items()}
        others = max(0.0, _machine_seconds() - self._before[0] - sum(used.values()))
        return {pid: used[pid] / passed for pid in self._servers}, others / passed


def wait_until_quiet(servers: Collection[int], seconds: float, *, step_s: float = 2.0) -> None:
    """Wait until other processes take next to nothing, `seconds` at the most."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        watch = CpuWatch(servers)
        time.sleep(step_s)
        if watch.cores()[1] < LIMIT_CORES:
            return


def server_pid(url: str) -> int | None:
    """Return the process that listens at a URL; None if it is another machine's or another user's."""
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
    """Return the fields of /proc/PID/stat behind the name, by pid."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                found[int(entry.name)] = (entry / "stat").read_text().rpartition(")")[2].split()
    return found


def _tree_seconds(roots: Collection[int]) -> dict[int, float]:
    """Return the CPU seconds of each root and the processes under it, also of ended ones that were waited for.

    A process counts for the nearest root above it. A root that has ended counts 0.
    """
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
    """Return the CPU seconds of the machine, with those that other machines on its host took (steal)."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
