"""Pictures and videos in folders, and those that a pattern stands for: found one by one, wherever the folders are."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlmserve.commands.batch.item import Failed, Found, MediumItem
from vlmserve.commands.client.media_names import PICTURES, VIDEOS, begins_as_medium


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """path: in its tree; begins as the folder that was searched does. is_link, is_local_file: a link, a regular file
    (or a link to one) of this machine. info: what else the tree knows of it."""

    path: str
    name: str
    is_folder: bool
    is_link: bool = False
    is_local_file: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


class Tree(ABC):
    """Folders in folders, of this machine or elsewhere. passed_over: paths left out of `walk` with all that is in
    them."""

    passed_over: frozenset[str] = frozenset()

    @abstractmethod
    def scan(self, folder: str) -> Iterator[Entry | Failed]:
        """The entries of one folder, hidden ones too, or why it cannot be read."""

    @abstractmethod
    def is_folder(self, path: str) -> bool:
        """Whether there is such a folder."""

    @abstractmethod
    def item(self, entry: Entry, root: str) -> MediumItem:
        """Of a picture or video. root: the folder that the search began in."""

    def identity(self, folder: str) -> tuple[int, int] | None:
        """The same for all paths of a folder, where links may lead in circles."""
        return None

    def walk(self, folder: str) -> Iterator[Entry | Failed]:
        """All entries below a folder but hidden ones; a folder's own come right behind it.

        Links are followed, but none to a folder around it, or to one that another link led to.
        """
        linked: set[tuple[int, int]] = set()
        around = [self.identity(folder)]
        open_scans = [self.scan(folder)]
        while open_scans:
            entry = next(open_scans[-1], None)
            if entry is None:
                open_scans.pop()
                around.pop()
            elif isinstance(entry, Failed):
                yield entry
            elif not entry.name.startswith(".") and not self._is_passed_over(entry):
                if entry.is_folder:
                    identity = self.identity(entry.path)
                    if entry.is_link and (identity in around or identity in linked):
                        continue
                    if entry.is_link and identity is not None:
                        linked.add(identity)
                    around.append(identity)
                    open_scans.append(self.scan(entry.path))
                yield entry

    def _is_passed_over(self, entry: Entry) -> bool:
        return bool(self.passed_over) and os.path.abspath(entry.path) in self.passed_over

    def matches(self, pattern: str) -> Iterator[Entry | Failed]:
        """What a pattern stands for ("**" for any folders), and what could not be searched. A hidden entry fits only
        what begins with a dot itself."""
        parts = os.path.normpath(pattern).split(os.sep)
        return self._matches("", parts) if parts[0] else self._matches(os.sep, parts[1:])

    def _matches(self, folder: str, parts: list[str]) -> Iterator[Entry | Failed]:
        part, rest = parts[0], parts[1:]
        if part == "**":
            if not rest:
                yield from self.walk(folder)
                return
            yield from self._matches(folder, rest)
            for below in self.walk(folder):
                if isinstance(below, Failed):
                    yield below
                elif below.is_folder:
                    yield from self._matches(below.path, rest)
        elif rest and not glob.has_magic(part):
            yield from self._matches(os.path.join(folder, part), rest)
        elif self.is_folder(folder):
            fits = re.compile(fnmatch.translate(part)).match
            for entry in self.scan(folder):
                if isinstance(entry, Failed):
                    yield entry
                elif fits(entry.name) and (part.startswith(".") or not entry.name.startswith(".")):
                    if not rest:
                        yield entry
                    elif entry.is_folder:
                        yield from self._matches(entry.path, rest)


@dataclass(kw_only=True)
class Files:
    """See `Source`. word: a folder of the tree, or a pattern. can_count: going through it costs little.

    searches_matches: folders that a pattern matches are searched too. ignored: files left out so far, as no media.
    """

    tree: Tree
    word: str
    is_pattern: bool
    can_count: bool = False
    searches_matches: bool = False
    ignored: int = field(default=0, init=False)

    def __iter__(self) -> Iterator[Found]:
        root = fixed_part(self.word) if self.is_pattern else self.word
        for found in self._media(self._is_wanted):
            yield found if isinstance(found, Failed) else self.tree.item(found, root)

    def count(self) -> Iterator[int | None]:
        return (1 for found in self._media(_is_medium) if isinstance(found, Entry)) if self.can_count else iter((None,))

    def named(self, address: Callable[[Entry], str]) -> Iterator[str | Failed]:
        """Of all files, whatever is in them, what `address` says."""
        for found in self.tree.matches(self.word):
            if isinstance(found, Failed):
                yield found
            elif not found.is_folder:
                yield address(found)

    def _is_wanted(self, found: Entry | Failed) -> bool:
        if wanted := _is_medium(found):
            return wanted
        assert isinstance(found, Entry)
        self.ignored += not found.is_folder
        return False

    def _media(self, is_wanted: Callable[[Entry | Failed], bool]) -> Iterator[Entry | Failed]:
        if not self.is_pattern:
            yield from filter(is_wanted, self.tree.walk(self.word))
            return
        # Where it names a suffix, that says which files are wanted. What ** matches comes with all that is below it.
        last = os.path.basename(self.word)
        suffix = os.path.splitext(last)[1]
        for found in self.tree.matches(self.word):
            if isinstance(found, Entry) and found.is_folder:
                if self.searches_matches and "**" not in last:
                    yield from filter(is_wanted, self.tree.walk(found.path))
            elif (suffix and not glob.has_magic(suffix)) or is_wanted(found):
                yield found


def fixed_part(pattern: str) -> str:
    """The folder in which the search of a pattern begins; a folder is its own."""
    if not glob.has_magic(pattern):
        return pattern
    folder = os.path.dirname(pattern)
    return fixed_part(folder) if folder != pattern else folder


def _is_medium(found: Entry | Failed) -> bool:
    """By its suffix, also where it cannot be read; without one, by its first bytes. What cannot be searched stays."""
    if isinstance(found, Failed):
        return True
    suffix = os.path.splitext(found.name)[1].lower()
    if suffix and not found.is_folder:
        return suffix in PICTURES + VIDEOS
    return found.is_local_file and begins_as_medium(Path(found.path))
