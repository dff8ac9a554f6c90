"""Pictures and videos in folders, and those that match a pattern, found one by one."""

from __future__ import annotations

import fnmatch
import glob
import itertools
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlmserve.commands.batch.inputs.files import MediaReader, printable
from vlmserve.commands.batch.item import Failed, Found, MediumItem
from vlmserve.commands.client.media import PICTURES, VIDEOS, begins_as_medium

_SORTED = 4096
"""The entries of a folder are sorted if there are no more than this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TreeEntry:
    """A file or folder of a tree. path: begins like the searched folder.

    is_link, is_local_file: a link, a regular file (or a link to one) on this machine. info: the tree's own details.
    """

    path: str
    name: str
    is_folder: bool
    is_link: bool = False
    is_local_file: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


class Tree(ABC):
    """A tree of folders, local or remote. passed_over: paths that `walk` leaves out with everything in them."""

    is_local = False
    passed_over: frozenset[str] = frozenset()

    @abstractmethod
    def scan(self, folder: str) -> Iterator[TreeEntry | Failed]:
        """Yield the entries of one folder, hidden ones too, or the reason why it cannot be read."""

    @abstractmethod
    def is_folder(self, path: str) -> bool:
        """Return True if there is such a folder."""

    @abstractmethod
    def item(self, entry: TreeEntry, root: str) -> MediumItem:
        """Make the item of a picture or video. root: the folder in which the search began."""

    def identity(self, folder: str) -> tuple[int, int] | None:
        """Return a value that is the same for all paths of a folder; None in trees without links."""
        return None

    def walk(self, folder: str) -> Iterator[TreeEntry | Failed]:
        """Yield all entries below a folder, except hidden ones. The entries of a folder follow it.

        Links are followed, except those to an enclosing folder or to a folder that another link led to.
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

    def _is_passed_over(self, entry: TreeEntry) -> bool:
        return bool(self.passed_over) and os.path.abspath(entry.path) in self.passed_over

    def matches(self, pattern: str) -> Iterator[TreeEntry | Failed]:
        """Yield the entries that match a pattern ("**": any folders), and the folders that could not be searched.

        A hidden entry matches only a part that begins with a dot itself.
        """
        parts = os.path.normpath(pattern).split(os.sep)
        return self._matches("", parts) if parts[0] else self._matches(os.sep, parts[1:])

    def _matches(self, folder: str, parts: list[str]) -> Iterator[TreeEntry | Failed]:
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
    """A `Source` of a tree's media. word: a folder of the tree, or a pattern. ignored: files left out, as no media.

    Only local folders are counted, since listing them costs little, and searched if a pattern matches them.
    """

    tree: Tree
    word: str
    is_pattern: bool
    ignored: int = field(default=0, init=False)

    def __iter__(self) -> Iterator[Found]:
        root = fixed_part(self.word) if self.is_pattern else self.word
        for found in self._media(self._is_wanted):
            yield found if isinstance(found, Failed) else self.tree.item(found, root)

    def count(self) -> Iterator[int | None]:
        if not self.tree.is_local:
            return iter((None,))
        return (1 for found in self._media(_is_medium) if isinstance(found, TreeEntry))

    def named(self, address: Callable[[TreeEntry], str]) -> Iterator[str | Failed]:
        """Yield the address of every file, whatever is in it."""
        for found in self.tree.matches(self.word):
            if isinstance(found, Failed):
                yield found
            elif not found.is_folder:
                yield address(found)

    def _is_wanted(self, found: TreeEntry | Failed) -> bool:
        if wanted := _is_medium(found):
            return wanted
        assert isinstance(found, TreeEntry)
        self.ignored += not found.is_folder
        return False

    def _media(self, is_wanted: Callable[[TreeEntry | Failed], bool]) -> Iterator[TreeEntry | Failed]:
        if not self.is_pattern:
            yield from filter(is_wanted, self.tree.walk(self.word))
            return
        # A pattern with a suffix decides which files are wanted. ** also matches everything below a folder.
        last = os.path.basename(self.word)
        suffix = os.path.splitext(last)[1]
        for found in self.tree.matches(self.word):
            if isinstance(found, TreeEntry) and found.is_folder:
                if self.tree.is_local and "**" not in last:
                    yield from filter(is_wanted, self.tree.walk(found.path))
            elif (suffix and not glob.has_magic(suffix)) or is_wanted(found):
                yield found


def fixed_part(pattern: str) -> str:
    """Return the folder in which the search of a pattern begins. A folder stays as it is."""
    if not glob.has_magic(pattern):
        return pattern
    folder = os.path.dirname(pattern)
    return fixed_part(folder) if folder != pattern else folder


def _is_medium(found: TreeEntry | Failed) -> bool:
    """Return True for a medium by its suffix or, without one, by its first bytes; and for anything that failed."""
    if isinstance(found, Failed):
        return True
    suffix = os.path.splitext(found.name)[1].lower()
    if suffix and not found.is_folder:
        return suffix in PICTURES + VIDEOS
    return found.is_local_file and begins_as_medium(Path(found.path))


class LocalTree(Tree):
    """A tree of local folders. No list is kept: of a million files, a few thousand are known at a time."""

    is_local = True

    def __init__(self, media: MediaReader, passed_over: frozenset[str] = frozenset()) -> None:
        self._media = media
        self.passed_over = passed_over

    def scan(self, folder: str) -> Iterator[TreeEntry | Failed]:
        try:
            with os.scandir(folder or os.curdir) as entries:
                first = sorted(itertools.islice(entries, _SORTED), key=lambda entry: entry.name)
                for entry in itertools.chain(first, entries):
                    yield TreeEntry(
                        path=os.path.join(folder, entry.name),
                        name=entry.name,
                        is_folder=_holds(entry.is_dir),
                        is_link=entry.is_symlink(),
                        is_local_file=_holds(entry.is_file),
                    )
        except OSError as error:
            yield Failed(id=printable(folder), message=f"cannot read the folder: {error.strerror}")

    def is_folder(self, path: str) -> bool:
        return os.path.isdir(path or os.curdir)

    def item(self, entry: TreeEntry, root: str) -> MediumItem:
        return self._media.item(entry.path, root=Path(root))

    def identity(self, folder: str) -> tuple[int, int] | None:
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
