"""PostgreSQL, for the rows of several servers.

psycopg and its pool do the work: broken connections are replaced, and nothing waits long for a database that is away.
Only one connection in the pool is kept when there is nothing to do.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from vlmserve.api.stores.rows import Database, Rows, StoreUnavailableError
from vlmserve.config.checks import SettingsError
from vlmserve_common.errors import BadRequestError, EngineError, first_line
from vlmserve_common.installing import install

logger = logging.getLogger(__name__)

_PATIENCE_S = 5.0  # for a connection
_FAIL_FAST_S = 1.0  # after none was to be had, so that not each request waits
_MOST_CONNECTIONS = 8
# What the URL does not say. A server that stops in the middle of something must not hold up the others.
_DEFAULTS = {
    "application_name": "vlmserve",
    "connect_timeout": "5",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "15000",
    "target_session_attrs": "read-write",
    "options": "-c statement_timeout=30s -c idle_in_transaction_session_timeout=30s",
}


def check_database_url(url: str) -> str:
    """Return what psycopg connects with. Raises SettingsError if psycopg is not installed, or cannot read the URL. No
    error has the URL, for it may hold a password."""
    if find_spec("psycopg") is None or find_spec("psycopg_pool") is None:
        raise SettingsError(f"--database-url needs psycopg: {install('postgres')}")
    import psycopg
    from psycopg.conninfo import conninfo_to_dict, make_conninfo

    try:
        return make_conninfo("", **{**_DEFAULTS, **conninfo_to_dict(url)})
    except psycopg.Error:
        raise SettingsError(
            "--database-url cannot be read; it must be a URL such as postgresql://USER:PASSWORD@HOST:5432/DATABASE, "
            "with %XX for characters that URLs do not have"
        ) from None


class Postgres:
    """The connections to a PostgreSQL database. Raises SettingsError, and EngineError if it cannot be used."""

    def __init__(self, url: str) -> None:
        given = check_database_url(url)
        import psycopg
        from psycopg_pool import ConnectionPool, PoolTimeout

        logging.getLogger("psycopg").setLevel(logging.ERROR)  # it tells of each connection, and of each try to connect
        self._given = given
        self._psycopg, self._no_connection = psycopg, PoolTimeout
        if (error := self._connecting_fails()) is not None:
            raise EngineError(f"the database cannot be used: {first_line(error)} (setting --database-url)")
        self._pool = ConnectionPool(
            given,
            name="store",
            min_size=1,
            max_size=_MOST_CONNECTIONS,
            timeout=_PATIENCE_S,
            reconnect_timeout=_PATIENCE_S,
            check=ConnectionPool.check_connection,
            kwargs={"prepare_threshold": None},  # for poolers between here and there
            open=True,
        )
        self._is_away = False
        self._fails_until = 0.0

    def database(self, name: str, schema: str) -> PostgresDatabase:
        """Return tables, which are made if they are missing."""
        try:
            return PostgresDatabase(self, name, schema)
        except self._psycopg.Error as error:
            raise EngineError(f"the database cannot be used: {first_line(error)} (setting --database-url)") from None

    @contextmanager
    def connection(self) -> Iterator[Any]:
        """Lend a connection. The transaction on it ends with the block. Raises StoreUnavailableError, and
        BadRequestError (507) if the database's disk is full."""
        psycopg = self._psycopg
        if time.monotonic() < self._fails_until:
            raise _unavailable()
        try:
            with self._pool.connection() as connection:
                yield connection
        except psycopg.errors.DiskFull:
            what = "the database's disk is full (setting --database-url)"
            raise BadRequestError(what, code="storage_full", status=507) from None
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:
            no_connection = isinstance(error, self._no_connection)
            if not self._is_away:
                why = (self._connecting_fails() if no_connection else None) or error
                logger.warning("the database does not answer: %s (setting --database-url)", first_line(why))
            self._is_away = True
            if no_connection:
                self._fails_until = time.monotonic() + _FAIL_FAST_S
            raise _unavailable() from None
        if self._is_away:
            logger.warning("the database answers again")
            self._is_away = False

    def close(self) -> None:
        """Close all connections."""
        self._pool.close()

    def _connecting_fails(self) -> Exception | None:
        """Return the reason why there is no connection, which the pool does not tell. None if there is one."""
        try:
            self._psycopg.connect(self._given).close()
        except self._psycopg.Error as error:
            return error
        return None


def _unavailable() -> StoreUnavailableError:
    what = "the database of files, batches and responses cannot be reached now (setting --database-url)"
    return StoreUnavailableError(what)


class PostgresDatabase(Database):
    """Tables of a PostgreSQL database."""

    replicated = True
    now = "CAST(extract(epoch FROM clock_timestamp()) AS BIGINT)"
    key = "BIGINT GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY"

    def __init__(self, server: Postgres, name: str, schema: str) -> None:
        super().__init__(name)
        self._server = server
        self._lock = zlib.crc32(f"vlmserve {name}".encode())
        self._create(schema)

    @contextmanager
    def transaction(self, *, alone: bool = False, durable: bool = True) -> Iterator[Rows]:
        """Begin a transaction, as `Database.transaction` does."""
        with self._server.connection() as connection:
            rows = _PostgresRows(connection.cursor(), "%s")
            if alone:
                rows.find("SELECT pg_advisory_xact_lock(?)", self._lock)
            if not durable:
                rows.run("SET LOCAL synchronous_commit = off")
            yield rows


class _PostgresRows(Rows):
    """Rows whose texts have no zero characters, which PostgreSQL does not take: nothing is found under such a name."""

    def find(self, query: str, *values: object) -> list[Any]:
        return super().find(query, *map(_without_zeros, values))

    def run(self, statement: str, *values: object) -> int:
        return super().run(statement, *map(_without_zeros, values))

    def run_many(self, statement: str, rows: Iterable[Sequence[object]]) -> None:
        super().run_many(statement, [[*map(_without_zeros, row)] for row in rows])


def _without_zeros(value: object) -> object:
    return value.replace("\0", "\ufffd") if isinstance(value, str) else value
