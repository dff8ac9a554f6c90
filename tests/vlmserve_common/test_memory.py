"""How much memory is left, by the machine and by control groups of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vlmserve_common.compute.memory import available_host_memory, free_memory, show_gib

GIB = 2**30


def _machine(folder: Path, membership: str, groups: dict[str, tuple[str, int, int]]) -> int:
    """What is left on a machine with 8 GiB. groups: path -> limit, bytes used, and of those in the page cache."""
    proc, cgroups = folder / "proc", folder / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {8 * 2**20} kB\n")
    (proc / "self" / "cgroup").write_text(membership)
    for path, (limit, used, cached) in groups.items():
        group = cgroups / path
        group.mkdir(parents=True, exist_ok=True)
        first = path.startswith("memory")
        (group / ("memory.limit_in_bytes" if first else "memory.max")).write_text(f"{limit}\n")
        (group / ("memory.usage_in_bytes" if first else "memory.current")).write_text(f"{used}\n")
        total = "total_" if first else ""
        lines = {"inactive_file": cached // 2, "active_file": cached - cached // 2, "anon": used - cached}
        (group / "memory.stat").write_text("".join(f"{total}{name} {size}\n" for name, size in lines.items()))
    return available_host_memory(proc, cgroups)


@pytest.mark.parametrize(
    ("membership", "groups", "left"),
    [
        ("", {}, 8 * GIB),
        ("0::/\n", {".": ("max", 5 * GIB, 0)}, 8 * GIB),
        # version 2: the group itself; one above it; in a container, where the path is that of the host
        ("0::/a/b\n", {"a/b": (str(4 * GIB), 3 * GIB, GIB)}, 2 * GIB),
        ("0::/a/b\n", {"a/b": ("max", GIB, 0), "a": (str(6 * GIB), GIB, 0)}, 5 * GIB),
        ("0::/docker/1234\n", {".": (str(3 * GIB), GIB, 0)}, 2 * GIB),
        ("0::/a\n", {"a": (str(GIB), 2 * GIB, 0)}, 0),
        # version 1
        ("3:cpu:/\n4:memory:/a\n0::/\n", {"memory/a": (str(4 * GIB), 3 * GIB, GIB)}, 2 * GIB),
        ("4:hugetlb,memory:/a\n", {"memory": (str(2 * GIB), GIB, 0), "memory/a": (str(2**63 - 4096), GIB, 0)}, GIB),
    ],
)
def test_the_tightest_limit_counts(
    tmp_path: Path, membership: str, groups: dict[str, tuple[str, int, int]], left: int
) -> None:
    assert _machine(tmp_path, membership, groups) == left


def test_without_proc_something_is_left() -> None:
    nowhere = Path("/no/such")
    assert available_host_memory(nowhere, nowhere) > 0


@pytest.mark.parametrize(("size", "shown"), [(GIB, "1 GiB"), (1.25 * GIB, "1.25 GiB"), (15 * 2**20, "15 MiB")])
def test_bytes_for_people(size: float, shown: str) -> None:
    assert show_gib(size) == shown


def test_what_torch_only_keeps_of_a_gpu_is_free(monkeypatch):
    kept = [30]
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 - sum(kept), 100))
    assert free_memory(torch.device("cuda:0")) == (100, 100)
