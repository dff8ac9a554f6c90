"""Limits of a process: on memory, CPU time and files for one that reads untrusted files, and on open files. Linux."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import resource
import signal
from dataclasses import dataclass
from pathlib import Path

_PR_SET_NO_NEW_PRIVS = 38


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessLimits:
    """Limits of a process that reads untrusted files.

    memory_bytes: how much it may map beyond its present memory, and the largest file that it may write. open_files:
    file descriptors, the present ones included.
    """

    memory_bytes: int
    open_files: int = 64


def confine(limits: ProcessLimits) -> None:
    """Limit this process for the rest of its life. When memory is short, it goes first."""
    for what, most in (
        (resource.RLIMIT_AS, _mapped_bytes() + limits.memory_bytes),
        (resource.RLIMIT_FSIZE, limits.memory_bytes),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_CORE, 0),
    ):
        _set(what, most, for_good=True)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def allow_cpu_time(seconds: float) -> None:
    """End this process by SIGXCPU once its threads together have used `seconds` more of CPU time."""
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    used = resource.getrusage(resource.RUSAGE_SELF)
    _set(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + seconds), for_good=False)


def return_memory() -> None:
    """Return freed memory to the system: the C library would keep up to 64 MiB of it."""
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _set(what: int, most: int, *, for_good: bool) -> None:
    hard = resource.getrlimit(what)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most if for_good else hard))


def _mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


def raise_open_files() -> int:
    """Raise this process's limit of open files, and its children's, to the hard limit. Returns the limit.

    The soft limit is 1024 on most systems, for the sake of programs that use select(); nothing here does.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def open_files_limit() -> int:
    """Return how many files and connections this process may have open."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 2**31 if soft == resource.RLIM_INFINITY else soft
