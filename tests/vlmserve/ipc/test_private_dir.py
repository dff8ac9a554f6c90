"""Private directories: who may enter, and who clears up after whom."""

from __future__ import annotations

import multiprocessing
import os
import socket
import stat
import subprocess
import sys
import tempfile
from multiprocessing.connection import Listener
from pathlib import Path

import pytest

from vlmserve.ipc.private_dir import PrivateDirectory, socket_base
from vlmserve_common.errors import EngineError


def test_is_private_and_goes_with_its_content(tmp_path: Path) -> None:
    with PrivateDirectory(tmp_path) as directory:
        assert stat.S_IMODE(directory.path.stat().st_mode) == 0o700
        (directory.path / "socket").touch()
        (directory.path / "more").mkdir()
    assert not directory.path.exists()
    directory.close()


def test_abandoned_ones_are_removed_and_living_ones_kept(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, sys; from vlmserve.ipc.private_dir import PrivateDirectory;"
        "d = PrivateDirectory(pathlib.Path(sys.argv[1])); (d.path / 'x').touch(); os.utime(d.path, (0, 0)); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 9
    [abandoned] = tmp_path.iterdir()
    foreign = tmp_path / f"vlmserve-{os.getuid() + 1}-x"
    foreign.mkdir()
    os.utime(foreign, (0, 0))
    fresh = tmp_path / f"vlmserve-{os.getuid()}-fresh"  # made this moment, not locked yet
    fresh.mkdir()
    (tmp_path / "elsewhere").mkdir()
    os.utime(tmp_path / "elsewhere", (0, 0))
    (tmp_path / f"vlmserve-{os.getuid()}-link").symlink_to(tmp_path / "elsewhere")
    with PrivateDirectory(tmp_path) as first:
        os.utime(first.path, (0, 0))
        assert not abandoned.exists()
        with PrivateDirectory(tmp_path) as second:
            assert first.path.exists()
            assert second.path.exists()
    assert foreign.exists()
    assert fresh.exists()
    assert (tmp_path / "elsewhere").exists()


def test_the_base_is_short_enough_for_a_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        assert socket_base() == Path(short)
        sizes = [size for size in range(60, 108) if _takes_sockets(Path(short), size, monkeypatch)]
    assert sizes == list(range(60, sizes[-1] + 1))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    assert socket_base() != tmp_path / "missing"
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(EngineError, match="set TMPDIR"):
        socket_base()


def _takes_sockets(short: Path, size: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a directory whose name has so many bytes is taken; if so, all sockets find room in it."""
    base = short / ("x" * (size - len(str(short)) - 1))
    base.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    if socket_base() != base:
        return False
    with PrivateDirectory(base) as directory, socket.socket(socket.AF_UNIX) as detokenizer:
        (directory.path / "r999").mkdir()
        detokenizer.bind(str(directory.path / "r999/detokenizer"))
        monkeypatch.setitem(multiprocessing.current_process()._config, "tempdir", str(directory.path))  # type: ignore[attr-defined]
        Listener(family="AF_UNIX").close()
    return True
