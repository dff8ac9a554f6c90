"""What all outputs are to a run."""

from __future__ import annotations

import contextlib
import fcntl
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmserve.commands.batch.item import Item
from vlmserve.commands.caption.journal import Journal
from vlmserve.commands.caption.result import Captioned, Touched
from vlmserve.config.checks import SettingsError
from vlmserve_common.files import flush_folder


class OutputError(SettingsError):
    """An output cannot be used, or not gone on with; the message says what to do."""


class Output(ABC):
    """Written by one thread. Order for each few results: `write` -> the journal -> `written`.

    needs_media: whether results must bring their media's bytes. by_path: whether each caption has a file of its own, so
    that a local picture is known by where it is, however that is written. journal: from `begin` on.
    """

    journal: Journal
    needs_media = False
    by_path = False

    @abstractmethod
    def paths(self) -> Sequence[Path]:
        """Of the files that `begin` opens or makes, which no input may be."""

    @abstractmethod
    def discard(self, journal: Journal) -> None:
        """Before `begin`: delete what the run of the journal wrote. OutputError, OSError."""

    @abstractmethod
    def begin(self, journal: Journal) -> None:
        """Go on where the journal says the output is. OutputError, OSError."""

    @abstractmethod
    def write(self, results: Sequence[Captioned]) -> Mapping[str, Any]:
        """Bring results to disk; returns what the journal is to keep about the output. OSError."""

    def written(self, results: Sequence[Captioned]) -> Sequence[Touched]:
        """The journal has the results: finish a part that is full. Returns the ones that have no place after all.
        OSError."""
        return ()

    def target(self, item: Item) -> str | None:
        """The file that an item's caption goes to, where each has one."""
        return None

    def refusal(self, item: Item, target: str | None) -> str | None:
        """Why an item's caption cannot go to its target, if so: known before anything is computed."""
        return None

    def check(self, item: Item) -> str | None:
        """An item was finished by an earlier run: put back what is missing of it. Why not, if that cannot be."""
        return None

    def room(self) -> int | None:
        """How many results the part in work has room for; None where that does not matter."""
        return None

    def finish(self) -> None:  # noqa: B027  # most have nothing to do
        """The run has ended in order: what is finished is to be whole for readers."""

    def close(self) -> None:  # noqa: B027
        """Let go of files, after `finish` or after an error."""


class Appended:
    """A file that only grows, of which the journal says how much counts. Locked while it is open."""

    def __init__(self, path: Path, size: int) -> None:
        """Cut off what is beyond `size` bytes. OutputError if it is shorter, or another run has it."""
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            lock(self._fd, path)
            there = os.fstat(self._fd).st_size
            if there < size:
                changed = f"{path} has {there} bytes, but {size} were written to it: it was changed since"
                raise OutputError(f"{changed}; --restart deletes it, and begins anew")
            if there > size:
                os.ftruncate(self._fd, size)
            flush_folder(path.parent)
        except BaseException:
            os.close(self._fd)
            raise
        self.size = size

    def append(self, data: bytes | memoryview) -> None:
        """Write at the end; not on disk before `sync`."""
        view = memoryview(data)
        with self._told():
            while view:
                count = os.pwrite(self._fd, view, self.size)
                self.size += count
                view = view[count:]

    def sync(self) -> None:
        """Return when everything is on disk."""
        with self._told():
            os.fsync(self._fd)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Errors name the file."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._fd)


class PartNames:
    """The names of an output's parts: `pattern` with their number put in for "%05d"; one without it has one part.

    many: whether there is more than one.
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.many = "%" in pattern

    def path(self, part: int) -> Path:
        """Of a part. Further parts of an output that is to have one are numbered before the suffix."""
        if self.many:
            return Path(self.pattern % part)
        path = Path(self.pattern)
        return path if part == 0 else path.with_name(f"{path.stem}-{part:05d}{path.suffix}")


def lock(fd: int, path: Path) -> None:
    """Keep other runs from a file for as long as it is open. OutputError."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise OutputError(f"{path} is in use by another run: give each its own --output") from None


def remove_locked(path: Path) -> None:
    """Delete a file, unless another run has it: OutputError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        lock(fd, path)
        path.unlink(missing_ok=True)
    finally:
        os.close(fd)


def check_own(path: Path, state: Mapping[str, Any]) -> None:
    """OutputError for a file that is there, but of which the journal knows nothing."""
    if not state and path.exists() and path.stat().st_size:
        raise OutputError(
            f"{path} is there already, and no journal says what is in it: name another --output, or remove it"
        )
