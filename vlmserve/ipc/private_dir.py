"""Directories that only this user can enter, and that vanish with the process that made them, even if it is killed.

The maker holds a lock on its directory as long as it lives. A later maker removes directories of the same user whose
lock is free. (Pid files would be fooled by pids that are used again, and by containers.)
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import time
from pathlib import Path

from vlmserve_common.errors import EngineError

logger = logging.getLogger(__name__)

# Between making a directory and locking it lies a moment in which it looks abandoned.
_GRACE_S = 10.0
# A unix socket's path holds 107 bytes; the longest name under the directory is what multiprocessing calls its own (a
# replica's detokenizer has one byte less).
_MAX_SOCKET_DIR_BYTES = 107 - len("/listener-xxxxxxxx")


class PrivateDirectory(contextlib.AbstractContextManager["PrivateDirectory"]):
    """A fresh directory with mode 0700 under `base`, named `prefix`-uid-random. A context manager."""

    def __init__(self, base: Path, prefix: str = "vlmserve") -> None:
        stem = f"{prefix}-{os.getuid()}-"
        _remove_abandoned(base, stem)
        self.path = Path(tempfile.mkdtemp(prefix=stem, dir=base))
        self._fd: int | None = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        """Remove the directory and all that is in it. May be called again."""
        if self._fd is None:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._fd)
        self._fd = None

    def __exit__(self, *_: object) -> None:
        self.close()


def socket_base() -> Path:
    """Find a place for a directory of sockets: $XDG_RUNTIME_DIR, the temporary directory or /tmp, the first that is
    writable and short enough for a unix socket's path. Raises EngineError if there is none."""
    longest_name = f"/vlmserve-{os.getuid()}-xxxxxxxx"
    candidates = [os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"]
    for candidate in candidates:
        if (
            candidate
            and os.path.isabs(candidate)
            and len(os.fsencode(candidate + longest_name)) <= _MAX_SOCKET_DIR_BYTES
            and os.access(candidate, os.W_OK | os.X_OK)
        ):
            return Path(candidate)
    raise EngineError(
        f"no directory for sockets among {[c for c in candidates if c]}: it must be writable and at most "
        f"{_MAX_SOCKET_DIR_BYTES - len(longest_name)} bytes long; set TMPDIR"
    )


def shared_memory_base() -> Path:
    """Find the best place for a directory of large arrays: /dev/shm if there is one, else as for sockets."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK | os.X_OK) else socket_base()


def _remove_abandoned(base: Path, stem: str) -> None:
    for path in base.glob(stem + "*"):
        try:
            # O_NOFOLLOW: in a world-writable directory the name may be another user's link
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            status = os.fstat(fd)
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < _GRACE_S:
                continue
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
            logger.info("removed %s, left behind by a process that is gone", path)
        except BlockingIOError:
            continue  # its maker lives
        finally:
            os.close(fd)
