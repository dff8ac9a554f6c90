"""The record of a batch, and OpenAI's object for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, cast

from typing_extensions import TypedDict

from vlmserve.api.answer_types import CompletionTokensDetails
from vlmserve.api.paging import Page

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
