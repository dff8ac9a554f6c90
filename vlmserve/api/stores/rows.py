"""Rows of files, batches and responses: what SQLite and PostgreSQL have in common here.

Statements are in the SQL that both speak: ? stands for a value, whole numbers 0 and 1 for no and yes.
"""

from __future__ import annotations

import errno
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from vlmserve_common.errors import EngineError
from vlmserve_common.process.threads import Threads

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class StoreUnavailableError(EngineError):
    """A store that several servers share cannot be reached for now; the status is 503."""


STORE_ERRORS = (OSError, sqlite3.OperationalError, StoreUnavailableError)
"""What stores raise when something cannot be read or written now."""


def is_full(error: Exception) -> bool:
    """Return True if a full disk or quota of this machine is the reason of an error."""
    code = getattr(error, "sqlite_errorcode", None)
    return code == sqlite3.SQLITE_FULL or (isinstance(error, OSError) and error.errno in NO_SPACE)


class Rows:
    """The rows as a transaction sees and changes them. cursor: as in Python's DB-API. marker: its word for a value."""

    def __init__(self, cursor: Any, marker: str = "?") -> None:
        self._cursor = cursor
        self._marker = marker

    def find(self, query: str, *values: object) -> list[Any]:
        """Return the rows that a query finds."""
        self._cursor.execute(query.replace("?", self._marker), values)
        found: list[Any] = self._cursor.fetchall()
        return found

    def run(self, statement: str, *values: object) -> int:
        """Run a statement, and return how many rows it changed."""
        self._cursor.execute(statement.replace("?", self._marker), values)
        return int(self._cursor.rowcount)

    def run_many(self, statement: str, rows: Iterable[Sequence[object]]) -> None:
        """Run a statement with the values of each row."""
        self._cursor.executemany(statement.replace("?", self._marker), rows)


class Database(ABC):
    """Tables that any thread may use. threads: for its short work, one after another.

    replicated: other servers use the tables, too. now: the time in whole seconds, as an expression of SQL; all servers
    have the same. key: the type of a column that numbers the rows.
    """

    replicated: ClassVar[bool]
    now: ClassVar[str]
    key: ClassVar[str]

    def __init__(self, name: str) -> None:
        self.threads = Threads(name, 1)

    @abstractmethod
    def transaction(self, *, alone: bool = False, durable: bool = True) -> AbstractContextManager[Rows]:
        """Begin a transaction, which ends with the block: as a whole or, after an exception, not at all.

        alone: until its end no other such transaction begins, at any server. durable: it lasts, whatever ends the
        machine. Raises StoreUnavailableError.
        """

    def find(self, query: str, *values: object) -> list[Any]:
        """Return the rows that a query finds."""
        with self.transaction() as rows:
            return rows.find(query, *values)

    def close(self) -> None:
        """Begin no more work."""
        self.threads.close()

    def _create(self, schema: str) -> None:
        """Create the tables that are missing. schema: statements, with {key} for the type of a key."""
        with self.transaction(alone=True) as rows:
            for statement in schema.format(key=self.key).split(";"):
                if statement.strip():
                    rows.run(statement)
