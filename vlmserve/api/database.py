"""SQLite files of the server: a transaction is on disk as a whole or not at all, whatever ends the process."""

from __future__ import annotations

import errno
import sqlite3
from pathlib import Path

from vlmserve_common.errors import EngineError

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_full(error: Exception) -> bool:
    """Whether the disk, or a quota of it, is why something could not be written."""
    code = getattr(error, "sqlite_errorcode", None)
    return code == sqlite3.SQLITE_FULL or (isinstance(error, OSError) and error.errno in NO_SPACE)


def open_database(path: Path, schema: str) -> sqlite3.Connection:
    """For any thread, one at a time. schema: statements that do nothing where all is there. The folder's owner sees to
    it that nobody else opens it. Raises EngineError."""
    try:
        path.touch(mode=0o600)
        database = sqlite3.connect(path, check_same_thread=False)
        for pragma in ("journal_mode = WAL", "synchronous = FULL"):
            database.execute(f"PRAGMA {pragma}")
        database.executescript(schema)
    except (OSError, sqlite3.Error) as error:
        raise EngineError(f"{path} cannot be used: {error} (setting --file-store-dir)") from error
    return database
