"""What the routes under /v1/files and /v1/batches answer."""

from __future__ import annotations

from typing import Literal

from typing_extensions import TypedDict

from vlmserve.api.openapi.answers.chat import CompletionTokensDetails


class FileObject(TypedDict):
    """Times are Unix seconds. bytes: its size."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"]


class _Page(TypedDict):
    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileList(_Page):
    data: list[FileObject]


class DeletedFile(TypedDict):
    id: str
    object: Literal["file"]
    deleted: bool


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
    """Of all answers."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int


class BatchObject(TypedDict):
    """Times are Unix seconds. usage: when it has ended."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchProblems | None
    input_file_id: str
    completion_window: str
    status: Literal[
        "validating", "in_progress", "finalizing", "cancelling", "completed", "failed", "expired", "cancelled"
    ]
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


class BatchList(_Page):
    data: list[BatchObject]
