"""What a run has finished, for itself and the next one: an SQLite file beside the output.

SQLite sees to what is hard: a transaction is on disk as a whole or not at all, whatever ends the process; a look-up
takes no memory to speak of, however many items there are; the file is locked while it is open.

Order of a write: the output's bytes are on disk -> one transaction names the items and how long the output is. What
an output holds beyond that was under way when a run ended, and is cut off by the next.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from vlmserve.commands.batch.item import Failed
from vlmserve.commands.caption.result import Captioned
from vlmserve.config.checks import SettingsError

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
    """A journal cannot be used: another run has it, other settings made it, or the file is none."""


class Journal:
    """Thread-safe. Nobody else can open it until it is closed. `begin` comes before everything but `state` and
    `targets`. Raises JournalError, and OSError where the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run = 0
        self._lock = threading.Lock()
        path.touch()  # whose error says more than SQLite's
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
        """A run begins. settings: what makes captions other ones, by name; JournalError if the last run had others."""
        with self._changing():
            self._check_settings(settings)
            self._put("settings", settings)
            self.run = (self._get("run") or 0) + 1
            self._put("run", self.run)
            self._db.execute("DELETE FROM failed WHERE key IS NULL")  # inputs are read anew, and told anew

    def forget(self) -> None:
        """Begin from nothing."""
        with self._changing():
            for table in ("about", "done", "failed"):
                self._db.execute(f"DELETE FROM {table}")

    def _prepare(self) -> None:
        self._db.execute("BEGIN EXCLUSIVE")  # with locking_mode: nobody else from here on
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
                f"{self.path} is of a run with other settings: {told}. Name another --output, or --restart to delete "
                "what that run wrote and begin anew"
            )

    # ---------------------------------------------------------------- look-ups

    def done_as(self, id_: str) -> tuple[bytes, bytes, int] | None:
        """Of a finished item its key, its fingerprint and the number of the run that finished it."""
        return self._one("SELECT key, fingerprint, run FROM done WHERE id = ?", _plain(id_))

    def has_failed(self, id_: str, key: bytes) -> bool:
        """Whether the item, asked in this way, failed before."""
        return self._one("SELECT 1 FROM failed WHERE id = ? AND key = ?", _plain(id_), key) is not None

    def record(self, id_: str) -> dict[str, Any] | None:
        """A finished item's record."""
        row = self._one("SELECT record FROM done WHERE id = ?", _plain(id_))
        return None if row is None else json.loads(row[0])

    def record_like(self, fingerprint: bytes) -> dict[str, Any] | None:
        """The record of any finished item of this content, asked in this way."""
        row = self._one("SELECT record FROM done WHERE fingerprint = ? LIMIT 1", fingerprint)
        return None if row is None else json.loads(row[0])

    def owner(self, target: str) -> str | None:
        """The id of the item whose caption a file holds."""
        row = self._one("SELECT id FROM done WHERE target = ? LIMIT 1", os.fsencode(target))
        return None if row is None else row[0]

    def count(self) -> int:
        """Of finished items."""
        return int(self._one("SELECT count(*) FROM done")[0])

    def failures(self) -> Iterator[Failed]:
        """What failed and still stands, in order."""
        for row in self._rows("SELECT seq, id, key, message, code FROM failed"):
            yield Failed(id=row[1], key=row[2], message=row[3], code=row[4])

    def records(self) -> Iterator[dict[str, Any]]:
        """Of all finished items, in the order in which they were."""
        for row in self._rows("SELECT seq, record FROM done"):
            yield json.loads(row[1])

    def left_over(self, limit: int) -> list[tuple[int, dict[str, Any]]]:
        """The first finished items that no part holds yet: sequence numbers and records."""
        rows = self._all("SELECT seq, record FROM done WHERE part IS NULL ORDER BY seq LIMIT ?", limit)
        return [(seq, json.loads(record)) for seq, record in rows]

    def state(self) -> dict[str, Any]:
        """What an output said last; empty before."""
        with self._lock, _explained(self.path):
            return self._get("output") or {}

    def targets(self) -> Iterator[str]:
        """The files of all finished items."""
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
        """These are finished, and the output has come that far. A finished item's failures are forgotten.

        touched: ids of finished items whose files look different, but are the same, and their new keys. undone: ids of
        items that are not finished after all.
        """
        with self._changing():
            for result in done:
                id_, target = _plain(result.work.item.id), result.work.target
                self._db.execute("DELETE FROM failed WHERE id = ?", (id_,))
                told = (id_, result.work.key, result.fingerprint, json.dumps(result.record))
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
        """Finished items up to a sequence number, as far as none held them, are in this part now."""
        with self._changing():
            self._db.execute("UPDATE done SET part = ? WHERE part IS NULL AND seq <= ?", (part, last))
            self._put("output", state)

    def close(self) -> None:
        """Let go of the file."""
        with self._lock:
            self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---------------------------------------------------------------- inside

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """One transaction."""
        with self._lock, _explained(self.path), self._db:
            self._db.execute("BEGIN")
            yield

    def _all(self, statement: str, *values: Any) -> list[Any]:
        with self._lock, _explained(self.path):
            return self._db.execute(statement, values).fetchall()

    def _one(self, statement: str, *values: Any) -> Any:
        return next(iter(self._all(statement, *values)), None)

    def _rows(self, statement: str) -> Iterator[Any]:
        """Rows by their sequence number, a few hundred at a time: others may write in between."""
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
    """SQLite's errors, as this program's own."""
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
    """What cannot be written as UTF-8 (names of files, halves of characters) with escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _shown(value: Any) -> str:
    text = _plain(json.dumps(value, ensure_ascii=False))
    return text if len(text) <= 120 else f"{text[:120]}..."
