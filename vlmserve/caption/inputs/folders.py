"""Pictures and videos in folders, and those that a pattern stands for: found one by one."""

from __future__ import annotations

import fnmatch
import glob
import itertools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vlmserve.caption.inputs.media import MediaReader
from vlmserve.caption.inputs.walking import Entry, scan, walk
from vlmserve.caption.item import Found, Unreadable
from vlmserve.client.media_names import PICTURES, VIDEOS, begins_as_medium


@dataclass(frozen=True, kw_only=True)
class Folder:
    """See `Source`. passed_over: absolute paths below it that are inputs of their own."""

    path: str
    media: MediaReader
    passed_over: frozenset[str] = frozenset()

    def __iter__(self) -> Iterator[Found]:
        return _items(self._media(), self.media, Path(self.path))

    def count(self) -> Iterator[int | None]:
        """See `Source`."""
        return (1 for found in self._media() if isinstance(found, str))

    def _media(self) -> Iterator[str | Unreadable]:
        return _only_media(walk(self.path, self.passed_over))


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """See `Source`. Folders that it matches are searched too."""

    pattern: str
    media: MediaReader

    def __iter__(self) -> Iterator[Found]:
        return _items(self._media(), self.media, Path(_fixed_part(self.pattern)))

    def count(self) -> Iterator[int | None]:
        """See `Source`."""
        return (1 for found in self._media() if isinstance(found, str))

    def _media(self) -> Iterator[str | Unreadable]:
        # Where it names a suffix, that says which files are wanted. What ** matches comes with all that is below it.
        last = os.path.basename(self.pattern)
        names_suffix = bool(os.path.splitext(last)[1]) and not glob.has_magic(os.path.splitext(last)[1])
        for found in matches(self.pattern):
            if isinstance(found, Unreadable):
                yield found
            elif found.is_folder:
                yield from () if "**" in last else _only_media(walk(found.path))
            elif names_suffix:
                yield found.path
            else:
                yield from _only_media([found])


def matches(pattern: str) -> Iterator[Entry | Unreadable]:
    """What a pattern stands for ("**" for any folders), and what could not be searched. A hidden entry fits only what
    begins with a dot itself."""
    parts = os.path.normpath(pattern).split(os.sep)
    return _matches("", parts) if parts[0] else _matches(os.sep, parts[1:])


def _matches(folder: str, parts: list[str]) -> Iterator[Entry | Unreadable]:
    part, rest = parts[0], parts[1:]
    if part == "**":
        if not rest:
            yield from walk(folder)
            return
        yield from _matches(folder, rest)
        for below in walk(folder):
            if isinstance(below, Unreadable):
                yield below
            elif below.is_folder:
                yield from _matches(below.path, rest)
    elif rest and not glob.has_magic(part):
        yield from _matches(os.path.join(folder, part), rest)
    elif os.path.isdir(folder or os.curdir):
        fits = re.compile(fnmatch.translate(part)).match
        for entry in scan(folder):
            if isinstance(entry, Unreadable):
                yield entry
            elif fits(entry.name) and (part.startswith(".") or not entry.name.startswith(".")):
                if not rest:
                    yield entry
                elif entry.is_folder:
                    yield from _matches(entry.path, rest)


def _fixed_part(pattern: str) -> str:
    parts = os.path.normpath(pattern).split(os.sep)
    fixed = list(itertools.takewhile(lambda part: not glob.has_magic(part), parts[:-1]))
    return os.sep.join(fixed) or (os.curdir if parts[0] else os.sep)


def _items(found: Iterator[str | Unreadable], media: MediaReader, root: Path) -> Iterator[Found]:
    return (one if isinstance(one, Unreadable) else media.item(one, root=root) for one in found)


def _only_media(entries: Iterator[Entry | Unreadable] | list[Entry]) -> Iterator[str | Unreadable]:
    for entry in entries:
        if isinstance(entry, Unreadable):
            yield entry
        elif not entry.is_folder and _is_medium(entry):
            yield entry.path


def _is_medium(entry: Entry) -> bool:
    """By its suffix, also where it cannot be read; without one, by its first bytes."""
    suffix = os.path.splitext(entry.name)[1].lower()
    if suffix:
        return suffix in PICTURES + VIDEOS
    return entry.is_file and begins_as_medium(Path(entry.path))
