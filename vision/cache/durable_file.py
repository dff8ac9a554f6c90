"""Writes files that exist whole or not at all, even after a crash, in folders that several processes write to.

Order: a temporary file grows beside the final one and is flushed to disk -> it is renamed -> the folder is flushed. A
temporary file that has not grown for some minutes counts as left by a dead writer. If its writer is only slow (on this
host or on another host of a shared file system), the writer's call fails.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

from vlmserve_common.files import flush_folder

_TEMPORARY = ".part"
_ABANDONED_AFTER_S = 600.0


def write_file(path: Path, parts: Sequence[bytes | memoryview], *, time_s: float) -> None:
    """Write a file of these parts, replacing one of that name. It is on disk when this returns.

    `time_s`: its modification time, seconds since 1970. Raises OSError, and then leaves nothing behind.
    """
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}{_TEMPORARY}")
    try:
        with temporary.open("xb", buffering=0) as file:
            for part in parts:
                _write_all(file.fileno(), memoryview(part))
            os.utime(file.fileno(), (time_s, time_s))
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    flush_folder(path.parent)


def make_folder(path: Path, *, mode: int = 0o777) -> None:
    """Make a folder (of this mode, less the umask) and its missing parents. They are on disk when this returns. Raises
    OSError."""
    if path.is_dir():
        return
    make_folder(path.parent)
    try:
        path.mkdir(exist_ok=True, mode=mode)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
    flush_folder(path.parent)


def is_temporary(name: str) -> bool:
    """Return True if `write_file` uses this file name before a file is whole."""
    return name.endswith(_TEMPORARY)


def remove_abandoned(temporary: Path, *, now_s: float) -> None:
    """Remove a temporary file if its writer is gone. `now_s`: seconds since 1970."""
    with contextlib.suppress(OSError):
        # either way: a clock that was set back must not keep it for ever
        if abs(now_s - temporary.stat().st_mtime) > _ABANDONED_AFTER_S:
            temporary.unlink()


@contextlib.contextmanager
def locked_file(path: Path, *, wait: bool) -> Iterator[bool]:
    """Hold a lock file, made if needed, against other processes and threads. The context is True if it is held.

    `wait`: wait until it is free. Raises OSError.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(fd)


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]
