"""Figures and answers of several replicas as those of one engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import reduce
from typing import Any, cast

from vlmserve.ipc.control_messages import ControlRefused, ControlResult, EngineState, ProfileResult, ServerInfo
from vlmserve.ipc.messages import HistogramStats, SchedulerStats


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
        )
    if isinstance(first, EngineState):
        return dataclasses.replace(reduce(_sum, same), paused=first.paused)
    return ProfileResult(path=", ".join(one.path for one in same), steps=max(one.steps for one in same))


def _sum(one: Any, other: Any) -> Any:
    """Add field by field. A field that is None on one side is None in the sum."""
    if one is None or other is None:
        return None
    if isinstance(one, HistogramStats):
        counts = tuple(a + b for a, b in zip(one.counts, other.counts, strict=True))
        return HistogramStats(bounds=one.bounds, counts=counts, sum=one.sum + other.sum)
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        sums = {name: _sum(getattr(one, name), getattr(other, name)) for name in names}
        return dataclasses.replace(one, **sums)  # type: ignore[type-var]
    return one + other
