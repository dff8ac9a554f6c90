"""Files that are there as a whole or not at all, and stay there."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def replacing(path: Path, *, on_disk: bool) -> Iterator[Path]:
    """Yield a file to write, which replaces `path` in the end: readers see the whole new file or the old one.

    on_disk: return only once the file is on disk.
    """
    # as short as any: names may be as long as the file system takes
    unfinished = path.with_name(f".{hashlib.blake2b(os.fsencode(path.name), digest_size=8).hexdigest()}.part")
    try:
        yield unfinished
        if on_disk:
            with unfinished.open("rb") as file:
                os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    if on_disk:
        flush_folder(path.parent)


def flush_folder(path: Path) -> None:
    """Bring a folder's names to disk. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
