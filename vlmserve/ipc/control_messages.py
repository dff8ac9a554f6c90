"""What operators ask of a running engine, and its answers: they travel on a socket of their own, never among requests.

Each is taken between two steps and answered at once, by its result or by a `ControlRefused`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from vlmserve.ipc.messages import SchedulerStats

Activity = Literal["CPU", "GPU"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FlushCacheReq:
    """Forget every cached prefix that no request uses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlushCacheResult:
    """tokens: how many were forgotten. num_running_reqs: those that keep theirs; num_waiting_reqs: those behind."""

    tokens: int
    num_running_reqs: int
    num_waiting_reqs: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GetServerInfoReq:
    """Ask for a `ServerInfo`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerInfo:
    """What only the engine's process knows. device, dtype: the model's."""

    stats: SchedulerStats
    paused: bool
    profiling: bool
    device: str
    dtype: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PauseReq:
    """Begin no further step until `ContinueReq`; requests are taken, and wait."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ContinueReq:
    """Go on after `PauseReq`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PauseResult:
    """The state that a `PauseReq` or `ContinueReq` led to."""

    paused: bool
    num_running_reqs: int
    num_waiting_reqs: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StartProfileReq:
    """Record what the next steps do. folder: where the trace goes. steps: after so many it ends by itself; None: when
    it is told to. activities: none: all that this machine has."""

    folder: str
    steps: int | None = None
    activities: tuple[Activity, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StopProfileReq:
    """End the recording and write its trace."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileResult:
    """path: the trace's file, there once the recording has ended. steps: recorded so far."""

    path: str
    steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AbortRequestsReq:
    """Take back all that these requests hold; unknown ids are ignored. Their clients have been told already."""

    rids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class AbortRequestsResult:
    """num_running_reqs, num_waiting_reqs: those that are left."""

    num_running_reqs: int
    num_waiting_reqs: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlRefused:
    """Why there is no result. status: as in HTTP; 409 where the engine is not in the state for it."""

    message: str
    status: int = 409


ControlRequest: TypeAlias = (
    FlushCacheReq | GetServerInfoReq | PauseReq | ContinueReq | StartProfileReq | StopProfileReq | AbortRequestsReq
)
ControlResult: TypeAlias = (
    FlushCacheResult | ServerInfo | PauseResult | ProfileResult | AbortRequestsResult | ControlRefused
)
