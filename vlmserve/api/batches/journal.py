"""Batches, their lines and their files: the journal is beside the rows of uploaded files.

A line is kept before it is reported, and only once. Whatever ends the server, another one, or the next, goes on with
the missing lines. The lines of a batch are forgotten when its files are written.

One server at a time works on a batch: the one that has its lease. It renews the lease. A batch whose lease is over is
free for all. A server that cancels a batch takes the lease from the one that has it, which is told by its next write.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO, Literal, cast

import pydantic_core
from typing_extensions import TypedDict

from vlmserve.api.answer_types import CompletionTokensDetails
from vlmserve.api.api_keys import share_of
from vlmserve.api.body import check_values
from vlmserve.api.errors import not_found
from vlmserve.api.file_store import FileStore
from vlmserve.api.pages import Page
from vlmserve.api.stores.opening import Stores
from vlmserve.api.stores.rows import Rows
from vlmserve.config.plain_problems import shortened
from vlmserve_common.errors import BadRequestError, VlmserveError
from vlmserve_common.process.threads import check_wanted

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
    seq {key}, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, ended INTEGER NOT NULL, record TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS lines (
    batch TEXT NOT NULL, line INTEGER NOT NULL, good INTEGER NOT NULL, record TEXT NOT NULL, PRIMARY KEY (batch, line)
);
CREATE TABLE IF NOT EXISTS leases (batch TEXT PRIMARY KEY, server TEXT NOT NULL, until BIGINT NOT NULL)
"""
_MOST_ENDED = 10_000  # batches that are over and still listed
LEASE_S = 20


class LeaseLostError(VlmserveError):
    """Another server works on the batch now."""


class BatchJournal:
    """The journal in stores, as one server uses it: each journal is another server's. Its methods raise
    StoreUnavailableError."""

    def __init__(self, stores: Stores) -> None:
        self._database = stores.database("batches", _SCHEMA)
        self.threads = self._database.threads
        self.close = self._database.close
        self.replicated = self._database.replicated
        self._server = secrets.token_hex(8)
        if not self.replicated:  # the last server is gone
            with self._database.transaction() as rows:
                rows.run("DELETE FROM leases")

    def add(self, batch: Batch, total: int, *, shared: bool = False) -> None:
        """Add a new batch, for this server. Raises BadRequestError (429) beyond `total` unfinished batches. shared:
        each owner has its own share of them."""
        with self._database.transaction(alone=True) as rows:
            held = dict(rows.find("SELECT owner, count(*) FROM batches WHERE ended = 0 GROUP BY owner"))
            count, most, limit = share_of(total, held, batch.owner, shared=shared)
            if count >= most:
                raise BadRequestError(
                    f"there are {count} batches that have not ended, the limit is {limit} (setting --max-batches)",
                    code="too_many_batches",
                    status=429,
                )
            rows.run(
                "INSERT INTO batches (id, owner, ended, record) VALUES (?, ?, 0, ?)",
                *(batch.id, batch.owner, _encoded(batch)),
            )
            old = "DELETE FROM batches WHERE ended = 1 AND seq <= (SELECT max(seq) FROM batches) - ?"
            rows.run(old, _MOST_ENDED)
            self._lease(rows, batch.id)

    def put(self, batch: Batch) -> None:
        """Replace the record of a batch. Raises LeaseLostError."""
        with self._database.transaction() as rows:
            if not self._renew(rows, batch.id):
                raise LeaseLostError
            statement = "UPDATE batches SET record = ?, ended = ? WHERE id = ?"
            rows.run(statement, _encoded(batch), int(batch.has_ended), batch.id)

    def forget_lines(self) -> None:
        """Delete the lines and leases of batches that have ended. It writes more than the end itself, which a full disk
        may let through."""
        with self._database.transaction() as rows:
            for table in ("leases", "lines"):
                rows.run(f"DELETE FROM {table} WHERE batch IN (SELECT id FROM batches WHERE ended = 1)")

    def find(self, owner: str, batch_id: str) -> Batch:
        """Return a batch. Raises BadRequestError (404) for an unknown batch and for a batch of another owner alike."""
        found = self._database.find("SELECT record FROM batches WHERE id = ? AND owner = ?", batch_id, owner)
        if not found:
            raise not_found("batch", batch_id)
        return _decoded(found[0])

    def take(self, owner: str, batch_id: str) -> Batch:
        """Take a batch from whichever server works on it, and return it. Raises BadRequestError (404)."""
        with self._database.transaction(alone=True) as rows:
            self._lease(rows, batch_id)  # what the other one writes at this moment comes first
            found = rows.find("SELECT record FROM batches WHERE id = ? AND owner = ?", batch_id, owner)
            if not found:
                raise not_found("batch", batch_id)
        return _decoded(found[0])

    def claim(self) -> Batch | None:
        """Take the oldest unfinished batch that no server works on, and return it."""
        with self._database.transaction(alone=True) as rows:
            leased = f"SELECT batch FROM leases WHERE until > {self._database.now}"
            query = f"SELECT record FROM batches WHERE ended = 0 AND id NOT IN ({leased}) ORDER BY seq LIMIT 1"
            found = [*map(_decoded, rows.find(query))]
            for batch in found:
                self._lease(rows, batch.id)
        return found[0] if found else None

    def renew(self) -> set[str]:
        """Renew the leases of this server, and return the ids of their batches."""
        with self._database.transaction() as rows:
            rows.run(f"UPDATE leases SET until = {self._until} WHERE server = ?", self._server)
            return {batch_id for (batch_id,) in rows.find("SELECT batch FROM leases WHERE server = ?", self._server)}

    def release(self) -> None:
        """Leave the batches of this server to the others."""
        with self._database.transaction() as rows:
            rows.run("DELETE FROM leases WHERE server = ?", self._server)

    def batches(self, owner: str) -> list[Batch]:
        """Return an owner's batches, the newest first."""
        found = self._database.find("SELECT record FROM batches WHERE owner = ? ORDER BY seq DESC", owner)
        return list(map(_decoded, found))

    def add_lines(self, batch_id: str, lines: Sequence[tuple[int, bool, dict[str, Any]]]) -> None:
        """Add finished lines: number, whether the line has an answer, and its record. Lines that are there already
        stay. Raises LeaseLostError when they are kept, if another server works on the batch."""
        new = [(batch_id, number, int(good), json.dumps(record)) for number, good, record in lines]
        with self._database.transaction() as rows:
            insert = "INSERT INTO lines (batch, line, good, record) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING"
            rows.run_many(insert, new)
            is_ours = self._renew(rows, batch_id)
        if not is_ours:
            raise LeaseLostError

    def done(self, batch_id: str) -> set[int]:
        """Return the numbers of a batch's finished lines."""
        return {line for (line,) in self._database.find("SELECT line FROM lines WHERE batch = ?", batch_id)}

    def counts(self, batch_id: str) -> tuple[int, int]:
        """Return how many finished lines have an answer, and how many have none."""
        query = "SELECT good, count(*) FROM lines WHERE batch = ? GROUP BY good"
        found = dict(self._database.find(query, batch_id))
        return found.get(1, 0), found.get(0, 0)

    def lines(self, batch_id: str, *, good: bool) -> Iterator[str]:
        """Yield the records of finished lines as JSON, in the order of the input, a few at a time."""
        last = -1
        while True:
            query = "SELECT line, record FROM lines WHERE batch = ? AND good = ? AND line > ? ORDER BY line LIMIT 100"
            found = self._database.find(query, batch_id, int(good), last)
            if not found:
                return
            yield from (row[1] for row in found)
            last = found[-1][0]

    @property
    def _until(self) -> str:
        return f"{self._database.now} + {LEASE_S}"

    def _lease(self, rows: Rows, batch_id: str) -> None:
        """Take the lease of a batch, whoever has it."""
        change = "ON CONFLICT (batch) DO UPDATE SET server = excluded.server, until = excluded.until"
        statement = f"INSERT INTO leases (batch, server, until) VALUES (?, ?, {self._until}) {change}"
        rows.run(statement, batch_id, self._server)

    def _renew(self, rows: Rows, batch_id: str) -> bool:
        """Renew the lease of a batch. Return False if another server has it."""
        statement = f"UPDATE leases SET until = {self._until} WHERE batch = ? AND server = ?"
        return rows.run(statement, batch_id, self._server) > 0


def _encoded(batch: Batch) -> str:
    return json.dumps(asdict(batch))


def _decoded(row: tuple[str]) -> Batch:
    raw = json.loads(row[0])
    return Batch(**{**raw, "problem": raw["problem"] and tuple(raw["problem"])})


MOST_ID_CHARS = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A line of the input. number: counted from 1, with blank lines. problem: (code, message) if the line cannot be
    answered; such a line has no body."""

    number: int
    custom_id: str | None
    body: dict[str, Any] | None = None
    problem: tuple[str, str] | None = None


def count_lines(file: BinaryIO, most: int) -> int:
    """Count the lines that are not blank. A large file is read in pieces. Raises BadRequestError for an empty file, and
    for more than `most` lines, blank ones included."""
    count, ends, blank = 0, 0, True
    while chunk := file.read(2**20):
        check_wanted()
        ends += chunk.count(b"\n")
        if ends > most:
            break
        *parts, rest = chunk.split(b"\n")
        for part in parts:
            count += not (blank and not part.strip())
            blank = True
        blank = blank and not rest.strip()
    count += not blank
    if ends > most or count > most:
        what = f"the file has more than {most} lines, blank ones included (setting --max-batch-lines)"
        raise BadRequestError(what, code="too_many_lines")
    if not count:
        raise BadRequestError("the file has no lines that are not blank", code="empty_file")
    return count


def read_lines(file: BinaryIO, endpoint: str, *, most_bytes: int, most_values: int) -> Iterator[Line]:
    """Yield all lines that are not blank, good and bad. A file gives the same lines each time.

    most_bytes, most_values: the limits of a line.
    """
    seen: set[str] = set()
    number = 0
    while raw := file.readline(most_bytes + 1):
        check_wanted()
        number += 1
        if len(raw) > most_bytes and not raw.endswith(b"\n"):
            while rest := file.readline(2**20):
                if rest.endswith(b"\n"):
                    break
            what = f"line {number} is longer than {most_bytes} bytes (setting --max-body-mib)"
            yield Line(number=number, custom_id=None, problem=("line_too_long", what))
        elif raw.strip():
            yield _parsed(raw, number, endpoint, seen, most_values)


def _parsed(raw: bytes, number: int, endpoint: str, seen: set[str], most_values: int) -> Line:
    def bad(code: str, what: str, custom_id: str | None = None) -> Line:
        return Line(number=number, custom_id=custom_id, problem=(code, f"line {number} {what}"))

    try:
        check_values(raw, most_values, f"line {number}")
        given = pydantic_core.from_json(raw, allow_inf_nan=False)
    except BadRequestError as error:
        return Line(number=number, custom_id=None, problem=("too_many_values", str(error)))
    except ValueError as error:
        return bad("invalid_json_line", f"is not valid JSON: {error}")
    if not isinstance(given, dict):
        return bad("invalid_json_line", "is not a JSON object")
    custom_id = given.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MOST_ID_CHARS:
        return bad(
            "invalid_custom_id", f"has no custom_id, or one that is not a text of 1 to {MOST_ID_CHARS} characters"
        )
    if custom_id in seen:
        return bad("duplicate_custom_id", f"has the custom_id of an earlier line: {custom_id!r}", custom_id)
    seen.add(custom_id)
    if given.get("method") != "POST":
        return bad(
            "invalid_method", f"has the method {shortened(repr(given.get('method')))}; it must be POST", custom_id
        )
    if given.get("url") != endpoint:
        what = f"has the url {shortened(repr(given.get('url')))}; it must be the batch's endpoint, {endpoint}"
        return bad("invalid_url", what, custom_id)
    unknown = sorted(given.keys() - {"custom_id", "method", "url", "body"})
    if unknown:
        return bad("invalid_line", f"has the unknown field {shortened(repr(unknown[0]))}", custom_id)
    if not isinstance(given.get("body"), dict):
        return bad("invalid_body", "has no body, or one that is not an object", custom_id)
    if given["body"].get("stream"):
        return bad("invalid_body", "asks for a stream; answers of batches are whole", custom_id)
    return Line(number=number, custom_id=custom_id, body=given["body"])


PURPOSE = "batch_output"  # no upload may have this purpose


def write_file(files: FileStore, journal: BatchJournal, batch: Batch, kind: str) -> str:
    """Write the file of the kind "output" or "error", unless an earlier server wrote it; return its id. Raises
    BadRequestError at a limit of the store, and OSError."""
    name = f"{batch.id}_{kind}.jsonl"
    for record in files.files(batch.owner):
        if (record.purpose, record.filename) == (PURPOSE, name):
            return record.id
    with files.begin(batch.owner) as upload:
        for line in journal.lines(batch.id, good=kind == "output"):
            check_wanted()
            upload.write(line.encode() + b"\n")
        record = upload.commit(filename=name, purpose=PURPOSE, expire_after_s=batch.output_expires_after_s)
        return record.id


def add_up(lines: Iterable[str]) -> BatchUsage:
    """Add up the tokens of a batch's answers."""
    tokens = dict.fromkeys(("input", "output", "cached", "reasoning"), 0)
    for line in lines:
        check_wanted()
        usage = json.loads(line)["response"]["body"].get("usage") or {}
        of_input = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        of_output = usage.get("completion_tokens_details") or usage.get("output_tokens_details") or {}
        tokens["input"] += usage.get("prompt_tokens") or usage.get("input_tokens") or 0
        tokens["output"] += usage.get("completion_tokens") or usage.get("output_tokens") or 0
        tokens["cached"] += of_input.get("cached_tokens") or 0
        tokens["reasoning"] += of_output.get("reasoning_tokens") or 0
    return {
        "input_tokens": tokens["input"],
        "input_tokens_details": {"cached_tokens": tokens["cached"]},
        "output_tokens": tokens["output"],
        "output_tokens_details": {"reasoning_tokens": tokens["reasoning"]},
        "total_tokens": tokens["input"] + tokens["output"],
    }
