"""Free and total memory: of the machine, of control groups, of a GPU."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_GIB = 1024**3


def available_host_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process may still take: the machine's available memory, or less if one of its control
    groups (version 1 or 2) has less left. Files in the page cache count as free: they are given up on demand."""
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # not Linux: the first figure stands
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
        available = min([available, *(limit - used for limit, used in _groups(proc, cgroups))])
    return max(0, available)


def total_host_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> tuple[int, int | None]:
    """Return the bytes of the machine's memory, or the least limit of this process's control groups if that is
    lower."""
    total, limits = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), []
    with contextlib.suppress(OSError, ValueError):
        limits = [limit for limit, _ in _groups(proc, cgroups) if limit < total]
    return total, min(limits, default=None)


def free_memory(device: torch.device) -> tuple[int, int]:
    """Return the bytes of a device's memory that this process may still take, and all there is; for a CPU, the first
    number twice.

    A GPU gets unused memory that torch keeps back first, which takes a while: not for every step.
    """
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)
    free = available_host_memory()
    return free, free


def show_gib(size: float) -> str:
    """Format bytes for people: 1.25 GiB, or MiB below one."""
    return f"{size / _GIB:.4g} GiB" if size >= _GIB else f"{size / 2**20:.4g} MiB"


def _groups(proc: Path, cgroups: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use of each control group that this process is in."""
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            files = ("memory.max", "memory.current", ("inactive_file ", "active_file "))
            yield from _with_those_above(cgroups, path, *files)
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file ", "total_active_file "))
            yield from _with_those_above(cgroups / "memory", path, *files)


def _with_those_above(
    root: Path, path: str, limit_file: str, used_file: str, cached: tuple[str, ...]
) -> Iterator[tuple[int, int]]:
    """Yield a group and all above it. In a container its path may be missing, but its own group is the root then."""
    own = PurePosixPath(path.lstrip("/"))
    for folder in (root / own, *(root / parent for parent in own.parents)):
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            limit = int((folder / limit_file).read_text())
            used = int((folder / used_file).read_text())
            for line in (folder / "memory.stat").read_text().splitlines():
                if line.startswith(cached):
                    used -= int(line.split()[1])
            yield limit, used
