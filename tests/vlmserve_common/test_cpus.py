"""Cores that may be used: a container's quota counts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from vlmserve_common.compute import cpus
from vlmserve_common.compute.cpus import available_cpus, usable_threads


@pytest.mark.parametrize(
    ("content", "cores"),
    [("max 100000\n", 64), ("200000 100000\n", 2), ("150000 100000\n", 2), ("10000 100000\n", 1), ("junk", 64)],
)
def test_the_quota_limits_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str, cores: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    (tmp_path / "cpu.max").write_text(content)
    assert available_cpus(tmp_path / "cpu.max") == cores
    assert available_cpus(tmp_path / "missing") == 64


def test_no_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(cpus, "available_cpus", lambda: 4)
    assert [usable_threads(wanted, "--num-threads") for wanted in (None, 1, 4)] == [4, 1, 4]
    assert not caplog.records
    assert usable_threads(16, "--num-threads") == 4
    assert caplog.messages == ["--num-threads is 16; 4 are used, for so many cores are available"]
