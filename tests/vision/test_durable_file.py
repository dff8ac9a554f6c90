"""Files that are whole or not there: the order of what is done, and what a dead writer leaves."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import subprocess
import sys

import pytest

from vision.cache.durable_file import is_temporary, locked_file, make_folder, remove_abandoned, write_file

NOW = 1_700_000_000.0


@pytest.fixture
def steps(monkeypatch):
    """What was done to files, in order: (what, name)."""
    seen = []

    def watch(name, place):
        real = getattr(os, name)

        def call(*args, **options):
            target = args[place]
            path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fspath(target)
            seen.append((name, os.path.basename(path)))
            return real(*args, **options)

        monkeypatch.setattr(os, name, call)

    watch("write", 0)
    watch("fsync", 0)
    watch("replace", 1)
    watch("mkdir", 0)
    return seen


def leave_temporary(folder, kernel=None):
    """A temporary file as a killed writer leaves it, perhaps one of another kernel."""
    code = (
        "import os, pathlib, sys; from vision.cache import durable_file as d;"
        "os.fsync = lambda fd: os._exit(9); d.write_file(pathlib.Path(sys.argv[1]), [b'half'], time_s=0)"
    )
    before = set(folder.iterdir())
    assert subprocess.run([sys.executable, "-c", code, str(folder / "x")], check=False).returncode == 9
    [path] = set(folder.iterdir()) - before
    os.utime(path, (NOW, NOW))
    if kernel is None:
        return path
    return path.rename(path.with_name(re.sub(r"\.[0-9a-f]{8}-", f".{kernel}-", path.name)))


def test_a_file_is_on_disk_before_it_has_its_name_and_its_name_before_the_call_returns(tmp_path, steps):
    write_file(tmp_path / "x", [b"one", memoryview(b"two")], time_s=NOW)
    assert (tmp_path / "x").read_bytes() == b"onetwo"
    assert (tmp_path / "x").stat().st_mtime == NOW
    [temporary] = {name for what, name in steps if what == "write"}
    assert is_temporary(temporary)
    assert not is_temporary("x")
    assert steps == [
        ("write", temporary),
        ("write", temporary),
        ("fsync", temporary),
        ("replace", "x"),
        ("fsync", tmp_path.name),
    ]


def test_folders_are_on_disk_too(tmp_path, steps):
    make_folder(tmp_path / "a" / "b")
    assert steps == [("mkdir", "a"), ("fsync", tmp_path.name), ("mkdir", "b"), ("fsync", "a")]
    make_folder(tmp_path / "a" / "b")
    assert len(steps) == 4


def test_writes_may_be_taken_in_pieces(tmp_path, monkeypatch):
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:3]))
    write_file(tmp_path / "x", [b"0123456789"], time_s=NOW)
    assert (tmp_path / "x").read_bytes() == b"0123456789"


@pytest.mark.parametrize("what", ["write", "fsync", "replace", "utime", "fstat"])
def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch, what):
    write_file(tmp_path / "x", [b"old"], time_s=NOW)

    def fail(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, what, fail)
    with pytest.raises(OSError, match="No space"):
        write_file(tmp_path / "x", [b"new"], time_s=NOW)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_bytes() == b"old"


def test_a_dead_writer_is_told_by_its_lock(tmp_path):
    dead, alive = leave_temporary(tmp_path), leave_temporary(tmp_path)
    with alive.open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.utime(alive, (0, 0))
        assert not remove_abandoned(alive, now_s=NOW)
        assert alive.exists()
    assert remove_abandoned(dead, now_s=NOW)
    assert not dead.exists()
    assert not remove_abandoned(dead, now_s=NOW)


def test_a_file_that_is_not_locked_yet_may_be_taken_for_abandoned(tmp_path, monkeypatch):
    """Whoever sweeps between its making and its lock removes it; another one is made."""
    real, swept = fcntl.flock, []

    def flock(fd, how):
        if not swept:
            [path] = tmp_path.iterdir()
            swept.append(path)
            assert remove_abandoned(path, now_s=NOW)
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    write_file(tmp_path / "x", [b"data"], time_s=NOW)
    assert swept
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_bytes() == b"data"


@pytest.mark.parametrize(("age_s", "removed"), [(0, False), (3000, False), (-3000, False), (4000, True), (-4000, True)])
def test_a_writer_of_another_host_is_told_by_age(tmp_path, age_s, removed):
    path = leave_temporary(tmp_path, kernel="00000000")
    assert remove_abandoned(path, now_s=NOW + age_s) == removed
    assert path.exists() != removed


def test_a_lock_is_held_by_one(tmp_path):
    with locked_file(tmp_path / "lock", wait=False) as first:
        assert first
        with locked_file(tmp_path / "lock", wait=False) as second:
            assert not second
    with locked_file(tmp_path / "lock", wait=True) as third:
        assert third
