"""Operators' questions to a running engine, and its answers. They travel on a socket of their own, never among
requests.

The engine takes a question between two steps and answers at once, with a result or a `ControlRefused`.
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
class GetServerInfoReq:
    """Ask for a `ServerInfo`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerInfo:
    """Facts that only the engine's process knows. device, dtype: the model's."""

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
class EngineState:
    """The state that a question led to. flushed: the cached tokens that a `FlushCacheReq` made the engine forget."""

    paused: bool
    num_running_reqs: int
    num_waiting_reqs: int
    flushed: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StartProfileReq:
    """Record the next steps. folder: for the trace. steps: how many; None records until `StopProfileReq`. activities:
    an empty tuple records all kinds that this machine has."""

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
    """Free all that these answers hold; unknown rids are ignored. Their clients have been told already."""

    rids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlRefused:
    """The reason why there is no result. status: as in HTTP; 409 if the engine is not in the state for the question."""

    message: str
    status: int = 409


ControlRequest: TypeAlias = (
    FlushCacheReq | GetServerInfoReq | PauseReq | ContinueReq | StartProfileReq | StopProfileReq | AbortRequestsReq
)
ControlResult: TypeAlias = EngineState | ServerInfo | ProfileResult | ControlRefused
