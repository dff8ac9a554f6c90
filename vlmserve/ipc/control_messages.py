"""Questions of operators and of /metrics to a running engine, and its answers.

They travel on a socket of their own, never among requests.

The engine takes a question between two steps and answers at once, with a result or a `ControlRefused`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal, TypeAlias, cast

from vlmserve.ipc.messages import Guesses, HistogramStats, SchedulerStats
from vlmserve.ipc.weight_messages import WeightsDone, WeightsOrder
from vlmserve_common.checkpoint.adapter_ref import AdapterRef

Activity = Literal["CPU", "GPU"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FlushCacheReq:
    """Forget every cached prefix that no request uses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GetServerInfoReq:
    """Ask for a `ServerInfo`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerInfo:
    """Facts that only the engine's process knows. device, dtype: the model's. urls: where other servers reach engines
    that work for them."""

    stats: SchedulerStats
    paused: bool
    profiling: bool
    device: str
    dtype: str
    urls: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class PauseReq:
    """Begin no further step until `ContinueReq`; requests are taken, and wait. retract: requests under way give their
    KV back, and are computed again later."""

    retract: bool = False


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
class LoadAdapterReq:
    """Load the LoRA adapter in a folder, or again what is known."""

    path: str


@dataclass(frozen=True, kw_only=True, slots=True)
class UnloadAdapterReq:
    """Forget a LoRA adapter, which no request uses any more."""

    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterLoaded:
    """A LoRA adapter is there. left_out: its modules that are not in this model. is_new: it was not there before."""

    adapter: AdapterRef
    left_out: tuple[str, ...] = ()
    is_new: bool = True

    def warnings(self, name: str) -> tuple[str, ...]:
        """Return what answers of the adapter, which is called so, have to say."""
        if not self.left_out:
            return ()
        shown = ", ".join(self.left_out[:3])
        how_many = f"{len(self.left_out)} modules that are not in this model (setting --lora-partial)"
        return (f"adapter {name!r}: left out: {how_many}: {shown}",)


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlRefused:
    """The reason why there is no result. status: as in HTTP; 409 if the engine is not in the state for the question."""

    message: str
    status: int = 409


ControlRequest: TypeAlias = (
    FlushCacheReq
    | GetServerInfoReq
    | PauseReq
    | ContinueReq
    | StartProfileReq
    | StopProfileReq
    | AbortRequestsReq
    | LoadAdapterReq
    | UnloadAdapterReq
    | WeightsOrder
)
ControlResult: TypeAlias = EngineState | ServerInfo | ProfileResult | AdapterLoaded | WeightsDone | ControlRefused


def sum_stats(stats: Sequence[SchedulerStats]) -> SchedulerStats:
    """Sum the figures of all replicas, in their order. A single replica's figures are returned as they are."""
    if len(stats) == 1:
        return stats[0]
    whole: SchedulerStats = reduce(_sum, stats)
    encoder, disks = whole.encoder, [one.encoder.disk for one in stats]
    if encoder.disk is not None:  # one folder, which all have
        there = [disk for disk in disks if disk is not None]
        most = {name: max(getattr(disk, name) for disk in there) for name in ("bytes", "entries")}
        encoder = dataclasses.replace(encoder, disk=dataclasses.replace(encoder.disk, **most))
    uneven = {name: max(getattr(one.experts, name) for one in stats) for name in ("imbalance", "imbalance_after")}
    experts = dataclasses.replace(whole.experts, **uneven)
    return dataclasses.replace(whole, encoder=encoder, experts=experts, replicas=tuple(stats))


def sum_results(results: Sequence[ControlResult]) -> ControlResult:
    """Join the replicas' answers to one question, in their order. If one refused, return its refusal."""
    refusals = [(replica, result) for replica, result in enumerate(results) if isinstance(result, ControlRefused)]
    if refusals:
        replica, refused = refusals[0]
        # all for the same reason, mostly
        alike = len(refusals) == len(results) and all(one.message == refused.message for _, one in refusals)
        return refused if alike else dataclasses.replace(refused, message=f"replica {replica}: {refused.message}")
    first, same = results[0], cast(Any, results)
    if isinstance(first, ServerInfo):
        return dataclasses.replace(
            first,
            stats=sum_stats([info.stats for info in same]),
            paused=any(info.paused for info in same),
            profiling=any(info.profiling for info in same),
            urls=tuple(url for info in same for url in info.urls),
        )
    if isinstance(first, AdapterLoaded):
        if any(one.adapter != first.adapter for one in same):
            return ControlRefused(message=f"{first.adapter.path} changed while replicas read it", status=409)
        return first
    if isinstance(first, EngineState):
        return dataclasses.replace(reduce(_sum, same), paused=first.paused)
    if isinstance(first, WeightsDone):
        return reduce(_sum, same)
    return ProfileResult(path=", ".join(one.path for one in same), steps=max(one.steps for one in same))


def _sum(one: Any, other: Any) -> Any:
    """Add field by field. A field that is None on one side is None in the sum."""
    if one is None or other is None:
        return None
    if isinstance(one, HistogramStats):
        counts = tuple(a + b for a, b in zip(one.counts, other.counts, strict=True))
        return HistogramStats(bounds=one.bounds, counts=counts, sum=one.sum + other.sum)
    if isinstance(one, Guesses):
        return one.plus(other)
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        sums = {name: _sum(getattr(one, name), getattr(other, name)) for name in names}
        return dataclasses.replace(one, **sums)  # type: ignore[type-var]
    return one + other
