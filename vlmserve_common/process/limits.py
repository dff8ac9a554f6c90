"""What the kernel allows a process that reads untrusted files. Linux; elsewhere there is what there is of it."""

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
    """memory_bytes: that it may map on top of what it has; a file that it writes may be as large.

    open_files: descriptors, with those that it has.
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
    """SIGXCPU ends this process when it has taken so much more CPU time, all its threads together."""
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    used = resource.getrusage(resource.RUSAGE_SELF)
    _set(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + seconds), for_good=False)


def return_memory() -> None:
    """Give back what was freed: the C library would keep as much as 64 MiB of it."""
    with contextlib.suppress(AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _set(what: int, most: int, *, for_good: bool) -> None:
    hard = resource.getrlimit(what)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most if for_good else hard))


def _mapped_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


def raise_open_files() -> int:
    """Let this process and its children have as many as they may without asking anybody; returns how many that are.

    The soft limit is 1024 on most systems, for the sake of programs that use select(); nothing here does.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def open_files_limit() -> int:
    """How many they are now."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 2**31 if soft == resource.RLIM_INFINITY else soft
