"""SQLite files of one server. A transaction is on disk as a whole or not at all, whatever ends the process."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vlmserve.api.stores.rows import Database, Rows
from vlmserve_common.errors import EngineError


class SqliteDatabase(Database):
    """The file NAME.sqlite3 of a folder. The caller makes sure that no other process opens it.

    schema: see `Database._create`. Raises EngineError.
    """

    replicated = False
    now = "CAST(strftime('%s', 'now') AS INTEGER)"
    key = "INTEGER PRIMARY KEY"

    def __init__(self, folder: Path, name: str, schema: str) -> None:
        super().__init__(name)
        self._lock = threading.Lock()
        path = folder / f"{name}.sqlite3"
        try:
            path.touch(mode=0o600)
            self._connection = sqlite3.connect(path, check_same_thread=False)
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = FULL")
            self._create(schema)
        except (OSError, sqlite3.Error) as error:
            raise EngineError(f"{path} cannot be used: {error} (setting --file-store-dir)") from error

    @contextmanager
    def transaction(self, *, alone: bool = False, durable: bool = True) -> Iterator[Rows]:
        """Begin a transaction, as `Database.transaction` does. Each one is alone."""
        with self._lock:
            if not durable:
                self._connection.execute("PRAGMA synchronous = NORMAL")
            try:
                with self._connection:
                    yield Rows(self._connection.cursor())
            finally:
                if not durable:
                    self._connection.execute("PRAGMA synchronous = FULL")

    def close(self) -> None:
        """Close the file."""
        super().close()
        with self._lock:
            self._connection.close()
