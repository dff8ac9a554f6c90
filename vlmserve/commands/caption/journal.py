"""The journal: an SQLite file beside the output, with the finished items of all runs; and the file of failed items.

SQLite does the hard parts. A transaction is on disk completely or not at all, whatever ends the process. A look-up
takes little memory, however many items there are. The file is locked while it is open.

Order of a write: the output's bytes are on disk -> one transaction names the items and the length of the output. Bytes
beyond that length were not finished when a run ended, and the next run cuts them off.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TextIO

from vlmserve.commands.batch.item import Failed
from vlmserve.commands.caption.result import Captioned
from vlmserve.config.checks import SettingsError
from vlmserve_common.files import replacing

_VERSION = 1
_SCHEMA = """
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE done (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, key BLOB NOT NULL, fingerprint BLOB NOT NULL,
    record TEXT NOT NULL, target BLOB, part INTEGER, run INTEGER NOT NULL
);
CREATE INDEX done_fingerprint ON done (fingerprint);
CREATE INDEX done_target ON done (target) WHERE target IS NOT NULL;
CREATE INDEX done_part ON done (part, seq);
CREATE TABLE failed (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL, key BLOB, message TEXT NOT NULL, code TEXT, run INTEGER NOT NULL
);
CREATE INDEX failed_id ON failed (id);
"""


class JournalError(SettingsError):
    """A journal cannot be used: another run has it, other settings made it, or the file is no journal."""


class CaptionJournal:
    """The open journal, locked for this process. Thread-safe. Only `state` and `targets` may come before `begin`.

    Raises JournalError, and OSError if the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run = 0
        self._lock = threading.Lock()
        path.touch()  # its error says more than SQLite's
        self._db = sqlite3.connect(path, timeout=0, check_same_thread=False, isolation_level=None)
        try:
            with _explained(path), self._db:
                for pragma in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = FULL"):
                    self._db.execute(f"PRAGMA {pragma}")
                self._prepare()
        except BaseException:
            self._db.close()
            raise

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Begin a run. settings: influences on captions, by name. JournalError if the last run's settings differ."""
        with self._changing():
            self._check_settings(settings)
            self._put("settings", settings)
            self.run = (self._get("run") or 0) + 1
            self._put("run", self.run)
            self._db.execute(
                "DELETE FROM failed WHERE key IS NULL"
            )  # inputs are read again, and their failures reported again

    def forget(self) -> None:
        """Delete everything."""
        with self._changing():
            for table in ("about", "done", "failed"):
                self._db.execute(f"DELETE FROM {table}")

    def _prepare(self) -> None:
        self._db.execute("BEGIN EXCLUSIVE")  # with locking_mode, this excludes other processes from here on
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            for statement in _SCHEMA.split(";"):
                self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version = {_VERSION}")
        elif version != _VERSION:
            raise JournalError(f"{self.path} is of another version of vlmserve ({version}, not {_VERSION})")

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        before, now = self._get("settings"), json.loads(json.dumps(settings))
        if before is None:
            return
        names = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
        if names:
            told = "; ".join(f"{name} was {_shown(before.get(name))}, is {_shown(now.get(name))}" for name in names)
            raise JournalError(
                f"{self.path} is of a run with other settings: {told}. Name another --output, or give --restart to "
                "delete that run's output and begin again"
            )

    # ---------------------------------------------------------------- look-ups

    def done_as(self, id_: str) -> tuple[bytes, bytes, int] | None:
        """Return the key, the fingerprint and the run number of a finished item."""
        return self._one("SELECT key, fingerprint, run FROM done WHERE id = ?", _plain(id_))

    def has_failed(self, id_: str, key: bytes) -> bool:
        """Return True if the item failed before with the same key."""
        return self._one("SELECT 1 FROM failed WHERE id = ? AND key = ?", _plain(id_), key) is not None

    def record(self, id_: str) -> dict[str, Any] | None:
        """Return a finished item's record."""
        row = self._one("SELECT record FROM done WHERE id = ?", _plain(id_))
        return None if row is None else json.loads(row[0])

    def record_like(self, fingerprint: bytes) -> dict[str, Any] | None:
        """Return the record of any finished item with this fingerprint."""
        row = self._one("SELECT record FROM done WHERE fingerprint = ? LIMIT 1", fingerprint)
        return None if row is None else json.loads(row[0])

    def owner(self, target: str) -> str | None:
        """Return the id of the item whose caption a file holds."""
        row = self._one("SELECT id FROM done WHERE target = ? LIMIT 1", os.fsencode(target))
        return None if row is None else row[0]

    def count(self) -> int:
        """Return the number of finished items."""
        return int(self._one("SELECT count(*) FROM done")[0])

    def failures(self) -> Iterator[Failed]:
        """Yield failures that still stand, in order."""
        for row in self._rows("SELECT seq, id, key, message, code FROM failed"):
            yield Failed(id=row[1], key=row[2], message=row[3], code=row[4])

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield the records of all finished items, in the order of finishing."""
        for row in self._rows("SELECT seq, record FROM done"):
            yield json.loads(row[1])

    def left_over(self, limit: int) -> list[tuple[int, dict[str, Any]]]:
        """Return sequence numbers and records of the first finished items that are in no part yet."""
        rows = self._all("SELECT seq, record FROM done WHERE part IS NULL ORDER BY seq LIMIT ?", limit)
        return [(seq, json.loads(record)) for seq, record in rows]

    def state(self) -> dict[str, Any]:
        """Return the last state of the output; empty before the first."""
        with self._lock, _explained(self.path):
            return self._get("output") or {}

    def targets(self) -> Iterator[str]:
        """Yield the caption files of finished items."""
        for row in self._rows("SELECT seq, target FROM done"):
            if row[1] is not None:
                yield os.fsdecode(row[1])

    # ---------------------------------------------------------------- writes: each is on disk when it returns

    def add(
        self,
        done: Sequence[Captioned],
        failed: Sequence[Failed],
        state: Mapping[str, Any],
        *,
        touched: Sequence[tuple[str, bytes]] = (),
        undone: Sequence[str] = (),
    ) -> None:
        """Note finished and failed items, and the state of the output. A finished item's failures are deleted.

        touched: ids and new keys of finished items whose files have a new date but the same content. undone: ids of
        items whose captions could not be written after all.
        """
        with self._changing():
            for result in done:
                id_, target = _plain(result.task.item.id), result.task.target
                self._db.execute("DELETE FROM failed WHERE id = ?", (id_,))
                told = (id_, result.task.key, result.fingerprint, json.dumps(result.record))
                self._db.execute(
                    "INSERT OR REPLACE INTO done (id, key, fingerprint, record, target, run) VALUES (?, ?, ?, ?, ?, ?)",
                    (*told, None if target is None else os.fsencode(target), self.run),
                )
            for failure in failed:
                id_ = _plain(failure.id)
                if failure.key is not None:
                    self._db.execute("DELETE FROM failed WHERE id = ?", (id_,))
                self._db.execute(
                    "INSERT INTO failed (id, key, message, code, run) VALUES (?, ?, ?, ?, ?)",
                    (id_, failure.key, _plain(failure.message), failure.code, self.run),
                )
            self._db.executemany("DELETE FROM done WHERE id = ?", [(_plain(id_),) for id_ in undone])
            self._db.executemany("UPDATE done SET key = ? WHERE id = ?", [(key, _plain(id_)) for id_, key in touched])
            self._put("output", state)

    def set_part(self, last: int, part: int, state: Mapping[str, Any]) -> None:
        """Assign finished items up to a sequence number, as far as they are in no part, to this part."""
        with self._changing():
            self._db.execute("UPDATE done SET part = ? WHERE part IS NULL AND seq <= ?", (part, last))
            self._put("output", state)

    def close(self) -> None:
        """Close and unlock the file."""
        with self._lock:
            self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---------------------------------------------------------------- inside

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        with self._lock, _explained(self.path), self._db:
            self._db.execute("BEGIN")
            yield

    def _all(self, statement: str, *values: Any) -> list[Any]:
        with self._lock, _explained(self.path):
            return self._db.execute(statement, values).fetchall()

    def _one(self, statement: str, *values: Any) -> Any:
        return next(iter(self._all(statement, *values)), None)

    def _rows(self, statement: str) -> Iterator[Any]:
        """Yield rows by sequence number, in pages: other threads may write in between."""
        last = 0
        while rows := self._all(f"{statement} WHERE seq > ? ORDER BY seq LIMIT 500", last):
            yield from rows
            last = rows[-1][0]

    def _get(self, name: str) -> Any:
        row = self._db.execute("SELECT value FROM about WHERE name = ?", (name,)).fetchone()
        return None if row is None else json.loads(row[0])

    def _put(self, name: str, value: Any) -> None:
        self._db.execute("INSERT OR REPLACE INTO about VALUES (?, ?)", (name, json.dumps(value)))


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise JournalError(f"{path} is in use by another run") from None
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            raise OSError(f"{path} cannot be written: {error}; is the disk full?") from None
        if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT):
            raise JournalError(f"{path} is damaged, or no journal of vlmserve: {error}") from None
        raise JournalError(f"{path}: {error}") from None


def _plain(text: str) -> str:
    """Escape text that UTF-8 does not allow: odd file names, halves of surrogate pairs."""
    return text.encode("utf-8", "backslashreplace").decode()


def _shown(value: Any) -> str:
    text = _plain(json.dumps(value, ensure_ascii=False))
    return text if len(text) <= 120 else f"{text[:120]}..."


logger = logging.getLogger("vlmserve.caption")

_MOST_LOGGED = 20
_MOST_LINE_BYTES = 1 << 20
_FIELDS = {"id", "message", "code"}


class ErrorsFile:
    """Holds the failures that still stand. It is made of the journal's failures when a run begins and ends.

    In between, failures are appended. path: None logs the first few instead. A pipe or device is only appended to.
    Raises SettingsError for a file with other content, OSError for one that cannot be written.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = None if path is None else path.resolve()  # a link's target is replaced, not the link
        self._file: TextIO | None = None
        self._logged = 0
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._check_own(self._path)
        self._path.open("a").close()

    def begin(self, standing: Iterable[Failed]) -> None:
        """Open the file with these failures. OSError."""
        if self._path is not None:
            self.write_anew(standing)
            self._file = self._path.open("a", encoding="utf-8", errors="replace")

    def write_anew(self, standing: Iterable[Failed]) -> None:
        """Replace the content by these failures."""
        if self._path is None or not self._path.is_file():
            return
        with (
            replacing(self._path, on_disk=True) as unfinished,
            unfinished.open("w", encoding="utf-8", errors="replace") as file,
        ):
            file.writelines(map(_line, standing))

    def _check_own(self, path: Path) -> None:
        if not path.is_file() or not path.stat().st_size:
            return
        with path.open("rb") as file:
            first = file.readline(_MOST_LINE_BYTES)
        try:
            ours = set(json.loads(first)) == _FIELDS
        except (ValueError, TypeError):
            ours = False
        if not ours:
            raise SettingsError(f"--errors is {str(path)!r}, which holds something else: name another file")

    def add(self, failed: Sequence[Failed]) -> None:
        """Append new failures."""
        for failure in failed if self._file is None else ():
            self._logged += 1
            if self._logged <= _MOST_LOGGED:
                logger.error("%s: %s", failure.id, failure.message)
            if self._logged == _MOST_LOGGED:
                logger.error("further failures are only counted: --errors FILE has them all")
        if self._file is not None and failed:
            self._file.writelines(map(_line, failed))
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _line(failure: Failed) -> str:
    line = {"id": failure.id, "message": failure.message, "code": failure.code}
    return json.dumps(line, ensure_ascii=False) + "\n"
