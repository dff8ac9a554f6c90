"""The interface of all outputs, the files that some of them share, and the outputs of lines and of caption files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmserve.commands.batch.item import Item, MediumItem
from vlmserve.commands.batch.shared_files import place_of
from vlmserve.commands.caption.journal import CaptionJournal
from vlmserve.commands.caption.prompts import PROMPT_FILE
from vlmserve.commands.caption.result import Captioned, Touched, as_text, file_name, output_line
from vlmserve.config.checks import SettingsError
from vlmserve_common.files import flush_folder, replacing


class OutputError(SettingsError):
    """An output cannot be used or continued. The message says what to do."""


class Output(ABC):
    """An output, written by one thread. Order of each batch of results: `write` -> the journal -> `written`.

    by_path: each caption has its own file, so a local picture is known by its absolute path. journal: set by `begin`.
    kept: places of files that no caption may replace, with their uses.
    """

    journal: CaptionJournal
    by_path = False
    kept: Mapping[str, str] = {}

    @abstractmethod
    def paths(self, others: Sequence[Path]) -> Sequence[Path]:
        """Return the files of fixed names that it writes, and those of `others` that would be among its parts."""

    @abstractmethod
    def discard(self, journal: CaptionJournal) -> None:
        """Delete everything that the journal's runs wrote, before `begin`. OutputError, OSError."""

    @abstractmethod
    def begin(self, journal: CaptionJournal) -> None:
        """Continue the output at the state in the journal. OutputError, OSError."""

    @abstractmethod
    def write(self, results: Sequence[Captioned]) -> Mapping[str, Any]:
        """Write results to disk; returns the state of the output for the journal. OSError."""

    def written(self, results: Sequence[Captioned]) -> Sequence[Touched]:
        """Finish a full part, after the journal has the results. Returns results that could not be written. OSError."""
        return ()

    def target(self, item: Item) -> str | None:
        """Return the file for an item's caption, if each caption has its own."""
        return None

    def refusal(self, item: Item, target: str | None) -> str | None:
        """Return the reason why an item's caption cannot go to its target, before it is computed; None if it can."""
        return None

    def check(self, item: Item) -> str | None:
        """Restore the missing caption file of a finished item. Returns the reason if that fails."""
        return None

    def room(self) -> int | None:
        """Return how many more results fit in the current part; None for any number."""
        return None

    def finish(self) -> None:  # noqa: B027  # most have nothing to do
        """Complete the output for readers, after a run that ended in order."""

    def close(self) -> None:  # noqa: B027
        """Close files, after `finish` or an error."""


class Appended:
    """A file that only grows. The journal has its valid length. Locked while it is open."""

    def __init__(self, path: Path, size: int) -> None:
        """Cut off everything beyond `size` bytes. OutputError if the file is shorter, or another run has it."""
        self.path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            lock(self._fd, path)
            there = os.fstat(self._fd).st_size
            if there < size:
                changed = f"{path} has {there} bytes, but {size} were written to it: it was changed since"
                raise OutputError(f"{changed}; --restart deletes it, and begins again")
            if there > size:
                os.ftruncate(self._fd, size)
            flush_folder(path.parent)
        except BaseException:
            os.close(self._fd)
            raise
        self.size = size

    def append(self, data: bytes | memoryview) -> None:
        """Write at the end. The bytes are on disk after `sync`."""
        view = memoryview(data)
        with self._told():
            while view:
                count = os.pwrite(self._fd, view, self.size)
                self.size += count
                view = view[count:]

    def sync(self) -> None:
        """Wait until everything is on disk."""
        with self._told():
            os.fsync(self._fd)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """Add the file's name to errors."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from None

    def close(self) -> None:
        """Close and unlock the file."""
        os.close(self._fd)


class PartNames:
    """The names of an output's parts: `pattern` with the number for "%05d". Without it there is one part.

    many: there may be several parts.
    """

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.many = "%" in pattern

    def path(self, part: int) -> Path:
        """Return the path of a part. Without "%05d", parts after the first have a number before the suffix."""
        if self.many:
            return Path(self.pattern % part)
        path = Path(self.pattern)
        return path if part == 0 else path.with_name(f"{path.stem}-{part:05d}{path.suffix}")

    def among(self, paths: Iterable[Path]) -> Iterator[Path]:
        """Yield the paths that are, or would be, numbered parts, finished or not."""
        folder = os.path.realpath(self.path(0).parent)
        for path in paths:
            there, name = os.path.split(os.path.realpath(path))
            if there == folder and self._is_part(name):
                yield path

    def check_own(self, state: Mapping[str, Any]) -> None:
        """Raise OutputError if a part is there, and no state in the journal."""
        first = self.path(0)
        check_own(first, state)
        if not state and first.parent.is_dir():
            for path in first.parent.iterdir():
                if self._is_part(path.name):
                    check_own(path, state)

    def _is_part(self, name: str) -> bool:
        name = name.removesuffix(".part")
        return any(self.path(int(number)).name == name for number in re.findall(r"\d+", name))


def lock(fd: int, path: Path) -> None:
    """Lock a file against other runs until it is closed. OutputError."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise OutputError(f"{path} is in use by another run: give each its own --output") from None


def remove_locked(path: Path) -> None:
    """Delete a file. OutputError if another run has it."""
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
    """Raise OutputError for an existing file without a state in the journal."""
    if not state and path.exists() and path.stat().st_size:
        raise OutputError(
            f"{path} is there already, and no journal says what is in it: name another --output, or remove it"
        )


class JsonLinesOutput(Output):
    """An output of lines. A file that was removed is written again from the journal."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Appended | None = None

    def paths(self, others: Sequence[Path]) -> Sequence[Path]:
        return [self._path]

    def discard(self, journal: CaptionJournal) -> None:
        if journal.state():
            remove_locked(self._path)

    def begin(self, journal: CaptionJournal) -> None:
        state = journal.state()
        check_own(self._path, state)
        anew = bool(state) and not self._path.exists()
        self._file = Appended(self._path, 0 if anew else state.get("bytes", 0))
        if anew:
            for record in journal.records():
                self._file.append(self._line(record))
            self._file.sync()
        if anew or not state:  # from here on the journal owns the file
            journal.add((), (), {"bytes": self._file.size})

    def write(self, results: Sequence[Captioned]) -> Mapping[str, Any]:
        assert self._file is not None
        self._file.append(b"".join(self._line(result.record) for result in results))
        self._file.sync()
        return {"bytes": self._file.size}

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _line(self, record: Mapping[str, Any]) -> bytes:
        return json.dumps(output_line(record), ensure_ascii=False).encode("utf-8", "replace") + b"\n"


_NO_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


class Sidecars(Output):
    """An output of caption files. folder: their place; None puts them beside the pictures.

    The journal has every caption on disk before its file is written. So each file has a known owner whatever ends a
    run. A later run writes missing and empty files again, and leaves files that the user has changed.

    suffix: ".txt" for the text, ".json" for the whole record. overwrite: replace files of other origin; otherwise
    their items fail.
    """

    by_path = True

    def __init__(self, folder: Path | None, *, suffix: str, overwrite: bool) -> None:
        self._folder = None if folder is None else Path(os.path.abspath(folder))
        self._suffix = suffix
        self._overwrite = overwrite

    def paths(self, others: Sequence[Path]) -> Sequence[Path]:
        return ()

    def discard(self, journal: CaptionJournal) -> None:
        for target in journal.targets():
            Path(target).unlink(missing_ok=True)

    def begin(self, journal: CaptionJournal) -> None:
        self.journal = journal
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)

    def target(self, item: Item) -> str | None:
        if self._folder is not None:
            return str(self._folder / (file_name(item) + self._suffix))
        if isinstance(item, MediumItem) and item.path is not None:
            path = Path(os.path.abspath(item.path))
            return str(path.with_name(path.stem + self._suffix))
        return None

    def refusal(self, item: Item, target: str | None) -> str | None:
        if target is None:
            return "it is no local file that a caption could be put beside: name an --output"
        if Path(target).name == PROMPT_FILE:
            return f"its caption would be {target}, which is what a folder is asked: --caption-suffix names another one"
        use = self.kept.get(place_of(target)) if self.kept else None
        if use is not None:
            return f"its caption would replace {target}, which is {use}: --caption-suffix names another one"
        owner = self.journal.owner(target)
        if owner is not None and owner != item.id:
            return f"{target} is the caption of {owner}: name an --output that keeps them apart"
        if owner is None and not self._overwrite and os.path.lexists(target):
            return f"{target} is there already: --overwrite replaces it, --caption-suffix names another one"
        return None

    def write(self, results: Sequence[Captioned]) -> Mapping[str, Any]:
        """Write nothing yet: the journal comes first."""
        return {"suffix": self._suffix}

    def written(self, results: Sequence[Captioned]) -> Sequence[Touched]:
        written = [
            Touched(task=result.task, trouble=self._write(Path(str(result.task.target)), result.record))
            for result in results
        ]
        return [each for each in written if each.trouble]

    def check(self, item: Item) -> str | None:
        target = self.target(item)
        if target is None:
            return None
        path = Path(target)
        if path.exists() and path.stat().st_size:
            return None
        record = self.journal.record(item.id)
        return None if record is None else self._write(path, record)

    def _write(self, path: Path, record: Mapping[str, Any]) -> str | None:
        """Write a file. Returns the reason if that fails; OSError if nothing can be written any more."""
        try:
            if self._folder is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path, on_disk=False) as unfinished:
                unfinished.write_bytes(self._content(record))
        except OSError as error:
            if error.errno in _NO_DISK:
                raise
            return f"its caption cannot be written to {path}: {error.strerror}"
        return None

    def _content(self, record: Mapping[str, Any]) -> bytes:
        if self._suffix.endswith(".json"):
            return (json.dumps(output_line(record), ensure_ascii=False, indent=1) + "\n").encode("utf-8", "replace")
        return as_text(record).encode("utf-8", "replace")
