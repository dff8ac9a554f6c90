"""How many replicas there should be, by the requests that wait and the KV in use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vlmserve.ipc.messages import SchedulerStats

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

USE = "use"
"""The name of the figure that replicas report: their use, as a part of the use that is wanted."""
# A replica is removed if the others have this much of their room left.
_MARGIN = 0.1


def use_of(stats: SchedulerStats, slots: int) -> float:
    """Return how much of a replica is in use: 1.0 is full, and more if requests wait.

    slots: the most requests that it computes together. Cached KV that no request needs is not in use.
    """
    kv = 0.0
    if stats.kv_total_tokens:
        needless = stats.kv_cached_tokens - stats.kv_locked_tokens
        kv = 1.0 - (stats.kv_free_tokens + needless) / stats.kv_total_tokens
    running, waiting = max(1, stats.num_running_reqs), stats.num_waiting_reqs
    busy = max(kv, stats.num_running_reqs / slots, 1 / slots if waiting else 0.0)
    return busy * (running + waiting) / running


def wanted(uses: Sequence[float], replicas: int) -> int:
    """Return how many replicas the work needs. uses: of each replica, as parts of the use that is wanted. replicas: how
    many there are, or are being started."""
    total = sum(uses)
    needed = max(1, math.ceil(total - 1e-6))
    if needed < replicas and total > (replicas - 1) * (1 - _MARGIN):
        return replicas
    return needed


def by_use(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Tell Serve how many replicas there should be: an autoscaling policy."""
    figures: Any = context.aggregated_metrics or {}
    uses = list(figures.get(USE, {}).values())
    if not uses:  # nobody has said anything yet
        return context.target_num_replicas, {}
    return wanted(uses, context.target_num_replicas), {}
