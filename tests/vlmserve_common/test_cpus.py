"""Cores that may be used: a container's quota counts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vlmserve_common.compute.cpus import available_cpus


@pytest.mark.parametrize(
    ("content", "cores"),
    [("max 100000\n", 64), ("200000 100000\n", 2), ("150000 100000\n", 2), ("10000 100000\n", 1), ("junk", 64)],
)
def test_the_quota_limits_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, cores: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    (tmp_path / "cpu.max").write_text(content)
    assert available_cpus(tmp_path / "cpu.max") == cores
    assert available_cpus(tmp_path / "missing") == 64
