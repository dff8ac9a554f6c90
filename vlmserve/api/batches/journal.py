"""Batches and their finished lines: an SQLite file beside the uploaded files.

A line is on disk before it is reported, and only once. Whatever ends the server, the next one goes on with the missing
lines. The lines of a batch are forgotten when its files are written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

from typing_extensions import TypedDict

from vlmserve.api.answer_types import CompletionTokensDetails
from vlmserve.api.database import Database
from vlmserve.api.errors import not_found
from vlmserve.api.openapi import Page
from vlmserve_common.errors import BadRequestError

Ended = Literal["completed", "failed", "expired", "cancelled"]
BatchStatus = Literal["validating", "in_progress", "finalizing", "cancelling"] | Ended
# The states that a batch does not leave any more
ENDED: tuple[Ended, ...] = ("completed", "failed", "expired", "cancelled")


class BatchProblem(TypedDict):
    code: str
    message: str
    param: str | None
    line: int | None


class BatchProblems(TypedDict):
    object: Literal["list"]
    data: list[BatchProblem]


class RequestCounts(TypedDict):
    total: int
    completed: int
    failed: int


class CachedTokens(TypedDict):
    cached_tokens: int


class BatchUsage(TypedDict):
    """The tokens of all answers."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int


class BatchObject(TypedDict):
    """A batch. Times are Unix seconds. usage: null until the batch has ended."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchProblems | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    cancelling_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage | None
    metadata: dict[str, str] | None


class BatchList(Page):
    data: list[BatchObject]


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """A batch, as the journal keeps it. Times are Unix seconds.

    owner, client, tenant: as of a `Caller`. outcome: the status when the files are written; None while lines are
    answered. total, completed, failed: lines; the latter two and usage are set at the end. output_expires_after_s: how
    long its files are kept; None: as other files. problem: (code, message) of the error that stopped it.
    """

    id: str
    owner: str
    client: str
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: dict[str, str]
    created_at: int
    expires_at: int
    tenant: str = ""
    output_expires_after_s: int | None = None
    status: BatchStatus = "validating"
    outcome: Ended | None = None
    problem: tuple[str, str] | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    usage: BatchUsage | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    cancelling_at: int | None = None
    ended_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def has_ended(self) -> bool:
        """Return True if the batch is over, and its files are there."""
        return self.status in ENDED

    def as_json(self, *, completed: int, failed: int) -> BatchObject:
        """Return OpenAI's object. completed, failed: lines until now."""
        errors: BatchProblems | None = None
        if self.problem is not None:
            code, message = self.problem
            errors = {"object": "list", "data": [{"code": code, "message": message, "param": None, "line": None}]}
        same = {name: getattr(self, name) for name in BatchObject.__annotations__ if hasattr(self, name)}
        ends = {f"{end}_at": self.ended_at if self.status == end else None for end in ENDED}
        own = {
            "object": "batch",
            "errors": errors,
            "request_counts": {"total": self.total, "completed": completed, "failed": failed},
            "metadata": self.metadata or None,
        }
        return cast("BatchObject", same | ends | own)


_SCHEMA = """
CREATE TABLE IF NOT EXISTS batches (
    seq INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, ended INTEGER NOT NULL, record TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS lines (
    batch TEXT NOT NULL, line INTEGER NOT NULL, good INTEGER NOT NULL, record TEXT NOT NULL, PRIMARY KEY (batch, line)
) WITHOUT ROWID;
"""
_MOST_ENDED = 10_000  # batches that are over and still listed


class BatchJournal(Database):
    """The journal of a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "batches.sqlite3", _SCHEMA)

    def add(self, batch: Batch, most: int) -> None:
        """Add a new batch. Raises BadRequestError (429) beyond `most` unfinished batches."""
        with self._lock, self._db:
            (count,) = self._db.execute("SELECT count(*) FROM batches WHERE NOT ended").fetchone()
            if count >= most:
                raise BadRequestError(
                    f"there are {count} batches that have not ended, the limit is {most} (setting --max-batches)",
                    code="too_many_batches",
                    status=429,
                )
            self._db.execute(
                "INSERT INTO batches (id, owner, ended, record) VALUES (?, ?, 0, ?)",
                (batch.id, batch.owner, _encoded(batch)),
            )
            self._db.execute(
                "DELETE FROM batches WHERE ended AND seq <= (SELECT max(seq) FROM batches) - ?", (_MOST_ENDED,)
            )

    def put(self, batch: Batch) -> None:
        """Replace the record of a batch."""
        with self._lock, self._db:
            self._db.execute(
                "UPDATE batches SET record = ?, ended = ? WHERE id = ?", (_encoded(batch), batch.has_ended, batch.id)
            )
            if batch.has_ended:
                self._db.execute("DELETE FROM lines WHERE batch = ?", (batch.id,))

    def find(self, owner: str, batch_id: str) -> Batch:
        """Return a batch. Raises BadRequestError (404) for an unknown batch and for a batch of another owner alike."""
        found = self.rows("SELECT record FROM batches WHERE id = ? AND owner = ?", batch_id, owner)
        if not found:
            raise not_found("batch", batch_id)
        return _decoded(found[0])

    def batches(self, owner: str) -> list[Batch]:
        """Return an owner's batches, the newest first."""
        rows = self.rows("SELECT record FROM batches WHERE owner = ? ORDER BY seq DESC", owner)
        return list(map(_decoded, rows))

    def unfinished(self) -> list[Batch]:
        """Return the unfinished batches of all owners, the oldest first."""
        return list(map(_decoded, self.rows("SELECT record FROM batches WHERE NOT ended ORDER BY seq")))

    def add_lines(self, batch_id: str, lines: Sequence[tuple[int, bool, dict[str, Any]]]) -> None:
        """Add finished lines: number, whether the line has an answer, and its record. Lines that are there already
        stay."""
        rows = [(batch_id, number, good, json.dumps(record)) for number, good, record in lines]
        with self._lock, self._db:
            self._db.executemany("INSERT OR IGNORE INTO lines (batch, line, good, record) VALUES (?, ?, ?, ?)", rows)

    def done(self, batch_id: str) -> set[int]:
        """Return the numbers of a batch's finished lines."""
        return {line for (line,) in self.rows("SELECT line FROM lines WHERE batch = ?", batch_id)}

    def counts(self, batch_id: str) -> tuple[int, int]:
        """Return how many finished lines have an answer, and how many have none."""
        found = dict(self.rows("SELECT good, count(*) FROM lines WHERE batch = ? GROUP BY good", batch_id))
        return found.get(1, 0), found.get(0, 0)

    def lines(self, batch_id: str, *, good: bool) -> Iterator[str]:
        """Yield the records of finished lines as JSON, in the order of the input, a few at a time."""
        last = -1
        while True:
            query = "SELECT line, record FROM lines WHERE batch = ? AND good = ? AND line > ? ORDER BY line LIMIT 100"
            rows = self.rows(query, batch_id, good, last)
            if not rows:
                return
            yield from (row[1] for row in rows)
            last = rows[-1][0]


def _encoded(batch: Batch) -> str:
    return json.dumps(asdict(batch))


def _decoded(row: tuple[str]) -> Batch:
    raw = json.loads(row[0])
    return Batch(**{**raw, "problem": raw["problem"] and tuple(raw["problem"])})
