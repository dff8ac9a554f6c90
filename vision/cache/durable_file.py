"""Files that are there whole or not at all, also after a crash, in folders that several processes write to.

Order: a temporary file beside the final one grows and is flushed to disk -> it is renamed -> the folder is flushed. The
writer holds a lock on the temporary file, which goes with its process. A temporary name tells the running kernel too,
since other hosts of a shared file system may not see each other's locks: there age decides.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

_TEMPORARY = re.compile(r".+\.([0-9a-f]{8})-\d+-[0-9a-f]{8}\.part")
_ABANDONED_AFTER_S = 3600.0


def write_file(path: Path, parts: Sequence[bytes | memoryview], *, time_s: float) -> None:
    """Write a file of these parts, in place of one that may be there; it is on disk when this returns.

    time_s: its modification time, seconds since 1970. Raises OSError, and then leaves nothing behind.
    """
    fd, temporary = _create_locked(path)
    try:
        for part in parts:
            _write_all(fd, memoryview(part))
        os.utime(fd, (time_s, time_s))
        os.fsync(fd)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    finally:
        os.close(fd)
    flush_folder(path.parent)


def make_folder(path: Path, *, mode: int = 0o777) -> None:
    """Make a folder (of this mode, less the umask) and those above it, where they are missing; on disk when this
    returns. Raises OSError."""
    if path.is_dir():
        return
    make_folder(path.parent)
    try:
        path.mkdir(exist_ok=True, mode=mode)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
    flush_folder(path.parent)


def flush_folder(path: Path) -> None:
    """Bring a folder's names to disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def is_temporary(name: str) -> bool:
    """Whether a file's name is one that `write_file` uses before a file is whole."""
    return _TEMPORARY.fullmatch(name) is not None


def remove_abandoned(temporary: Path, *, now_s: float) -> bool:
    """Remove a temporary file whose writer is gone; whether it was. now_s: seconds since 1970."""
    match = _TEMPORARY.fullmatch(temporary.name)
    assert match, temporary
    try:
        fd = os.open(temporary, os.O_RDWR | os.O_CLOEXEC)  # network file systems lock only what may be written
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # either way: a clock that was set back must not keep it for ever
        old = abs(now_s - os.fstat(fd).st_mtime) > _ABANDONED_AFTER_S
        if match.group(1) != _running_kernel() and not old:
            return False
        temporary.unlink()
    except OSError:
        return False
    else:
        return True
    finally:
        os.close(fd)


@contextlib.contextmanager
def locked_file(path: Path, *, wait: bool) -> Iterator[bool]:
    """Hold a lock file, which is made if need be, against other processes and threads; whether it is held.

    wait: until it can be. Raises OSError.
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


def _create_locked(path: Path) -> tuple[int, Path]:
    while True:
        temporary = path.with_name(f"{path.name}.{_running_kernel()}-{os.getpid()}-{secrets.token_hex(4)}.part")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if os.fstat(fd).st_nlink:
                return fd, temporary
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            os.close(fd)
            raise
        os.close(fd)  # it was taken for abandoned before it was locked


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


@cache
def _running_kernel() -> str:
    """Eight hexadecimal digits unlike those of other hosts and of this one before it was started again."""
    return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
