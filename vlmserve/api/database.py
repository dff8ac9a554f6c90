"""SQLite files of the server. A transaction is on disk as a whole or not at all, whatever ends the process."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path

from vlmserve_common.errors import EngineError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_full(error: Exception) -> bool:
    """Return True if a full disk or quota is the reason of an error."""
    code = getattr(error, "sqlite_errorcode", None)
    return code == sqlite3.SQLITE_FULL or (isinstance(error, OSError) and error.errno in NO_SPACE)


def open_database(path: Path, schema: str) -> sqlite3.Connection:
    """Open a database that any thread may use, one at a time.

    schema: statements that change nothing if the tables exist. The caller makes sure that no other process opens the
    file. Raises EngineError.
    """
    try:
        path.touch(mode=0o600)
        database = sqlite3.connect(path, check_same_thread=False)
        for pragma in ("journal_mode = WAL", "synchronous = FULL"):
            database.execute(f"PRAGMA {pragma}")
        database.executescript(schema)
    except (OSError, sqlite3.Error) as error:
        raise EngineError(f"{path} cannot be used: {error} (setting --file-store-dir)") from error
    return database
