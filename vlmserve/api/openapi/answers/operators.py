"""What all other routes answer, and every error."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import TypedDict


class ErrorDetail(TypedDict):
    """param: the field that is wrong. code: a word for programs."""

    message: str
    type: Literal[
        "invalid_request_error", "authentication_error", "not_found_error", "rate_limit_error", "server_error"
    ]
    param: str | None
    code: str | None


class Error(TypedDict):
    """Every answer with a status from 400 on."""

    error: ErrorDetail


class ModelObject(TypedDict):
    """max_model_len: the context length in tokens."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelObject]


class WarmedMedium(TypedDict):
    """In temporal patches, of which a picture has one: found in the cache, encoded now. saved: whether all of them are
    on disk."""

    type: Literal["image", "video"]
    temporal_patches: int
    found: int
    encoded: int
    patches_encoded: int
    saved: bool | None


class Warmup(TypedDict):
    id: str
    object: Literal["warmup"]
    items: list[WarmedMedium]


class Health(TypedDict):
    status: Literal["ok", "paused"]


class Version(TypedDict):
    version: str


class ServerState(TypedDict):
    """settings: without secrets. scheduler: its figures."""

    version: str
    model: str
    max_model_len: int
    device: str
    dtype: str
    uptime_s: float
    paused: bool
    profiling: bool
    num_pending: int
    scheduler: dict[str, Any]
    settings: dict[str, Any]


class FlushedCache(TypedDict):
    flushed_tokens: int


class CacheInUse(Error):
    """Some requests keep their part of the cache. tokens: those that were forgotten."""

    tokens: int
    num_running_reqs: int
    num_waiting_reqs: int


class PauseState(TypedDict):
    paused: bool
    num_running_reqs: int
    num_waiting_reqs: int


class ProfileTrace(TypedDict):
    """path: of the trace. num_steps: null if it is recorded until it is told to stop."""

    path: str
    num_steps: int | None


class AbortedRequests(TypedDict):
    """aborted: their ids."""

    aborted: list[str]
