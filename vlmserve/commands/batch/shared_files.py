"""Refuses command lines in which one file has two uses, so that one would destroy what the other needs."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

from vlmserve.config.checks import SettingsError

Use: TypeAlias = tuple[str, Path | None]
"""An option, or a word such as INPUT, and the file that it names, if any."""


def refuse_shared_files(written: Iterable[Use], read: Iterable[Use]) -> None:
    """Raise SettingsError for a file that two options write, or that is both read and written. Nothing is opened.

    An option may write several files. Pipes, devices and folders can be shared.
    """
    writers: dict[object, tuple[str, Path]] = {}
    for option, path in written:
        if path is not None and (key := _identity(path)) is not None:
            _compare((option, path), writers.setdefault(key, (option, path)))
    for option, path in read:
        if path is not None and (key := _identity(path)) in writers:
            _compare((option, path), writers[key])


def _compare(use: tuple[str, Path], writer: tuple[str, Path]) -> None:
    (option, path), (other, same) = use, writer
    if option != other:
        how = f"{option} and {other} are one file, {str(path)!r}"
        how += "" if path == same else f" (also {str(same)!r})"
        raise SettingsError(f"{how}: name another one for {other}")


def _identity(path: Path) -> object:
    """Return a value that all names of a file share; None if it can be shared."""
    try:
        status = path.stat()
    except OSError:  # it is not there yet
        return os.path.realpath(path)
    return (status.st_dev, status.st_ino) if stat.S_ISREG(status.st_mode) else None


def place_of(path: str | Path) -> str:
    """Return the path of a name in its folder. Links to the folder are followed, but not a link of that name."""
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(folder), name)
