"""Walks through local folders that keep no list: of a million files, a few thousand are known at a time."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vlmserve.caption.inputs.source import printable
from vlmserve.caption.item import Unreadable

_SORTED = 4096
"""The entries of a folder come in order if it has no more than these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """path: begins as the folder that was walked does. is_file: a regular one, or a link to one."""

    path: str
    name: str
    is_folder: bool
    is_file: bool
    is_link: bool


def scan(folder: str) -> Iterator[Entry | Unreadable]:
    """The entries of one folder ("" is the current one), hidden ones too."""
    try:
        with os.scandir(folder or os.curdir) as entries:
            first = sorted(itertools.islice(entries, _SORTED), key=lambda entry: entry.name)
            for entry in itertools.chain(first, entries):
                yield Entry(
                    path=os.path.join(folder, entry.name),
                    name=entry.name,
                    is_folder=_holds(entry.is_dir),
                    is_file=_holds(entry.is_file),
                    is_link=entry.is_symlink(),
                )
    except OSError as error:
        yield Unreadable(id=printable(folder), message=f"cannot read the folder: {error.strerror}")


def walk(folder: str, passed_over: frozenset[str] = frozenset()) -> Iterator[Entry | Unreadable]:
    """All entries below a folder but hidden ones; a folder's own come right behind it.

    Links are followed, but none to a folder around it, or to one that another link led to. passed_over: absolute paths
    that are left out with all that is in them.
    """
    linked: set[tuple[int, int]] = set()
    around = [_identity(folder)]
    open_scans = [scan(folder)]
    while open_scans:
        entry = next(open_scans[-1], None)
        if entry is None:
            open_scans.pop()
            around.pop()
        elif isinstance(entry, Unreadable):
            yield entry
        elif not entry.name.startswith(".") and not (passed_over and os.path.abspath(entry.path) in passed_over):
            if entry.is_folder:
                identity = _identity(entry.path)
                if entry.is_link and (identity in around or identity in linked):
                    continue
                if entry.is_link and identity is not None:
                    linked.add(identity)
                around.append(identity)
                open_scans.append(scan(entry.path))
            yield entry


def _identity(folder: str) -> tuple[int, int] | None:
    try:
        status = os.stat(folder or os.curdir)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _holds(question: Callable[[], bool]) -> bool:
    try:
        return question()
    except OSError:  # a link to itself, say
        return False
