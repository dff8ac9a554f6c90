"""SQLite files of the server. A transaction is on disk as a whole or not at all, whatever ends the process."""

from __future__ import annotations

import errno
import sqlite3
import threading
from pathlib import Path
from typing import Any

from vlmserve_common.errors import EngineError
from vlmserve_common.process.threads import Threads

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_full(error: Exception) -> bool:
    """Return True if a full disk or quota is the reason of an error."""
    code = getattr(error, "sqlite_errorcode", None)
    return code == sqlite3.SQLITE_FULL or (isinstance(error, OSError) and error.errno in NO_SPACE)


class Database:
    """A database that any thread may use, one at a time; each write is on disk when it returns.

    schema: statements that change nothing if the tables exist. threads: for its short work. The caller makes sure that
    no other process opens the file. Raises EngineError.
    """

    def __init__(self, path: Path, schema: str) -> None:
        self.threads = Threads(path.stem, 1)
        self._lock = threading.Lock()
        try:
            path.touch(mode=0o600)
            self._db = sqlite3.connect(path, check_same_thread=False)
            for pragma in ("journal_mode = WAL", "synchronous = FULL"):
                self._db.execute(f"PRAGMA {pragma}")
            self._db.executescript(schema)
        except (OSError, sqlite3.Error) as error:
            raise EngineError(f"{path} cannot be used: {error} (setting --file-store-dir)") from error

    def rows(self, query: str, *values: object) -> list[Any]:
        """Return the rows that a query finds."""
        with self._lock:
            return self._db.execute(query, values).fetchall()

    def close(self) -> None:
        """Close the file."""
        self.threads.close()
        with self._lock:
            self._db.close()
