"""The use of replicas, and how many of them the work needs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from vision.cache.stats import PoolStats
from vlmserve.ipc.messages import SchedulerStats
from vlmserve.ray.service.scaling import USE, by_use, use_of, wanted


def stats(**figures: int) -> SchedulerStats:
    return SchedulerStats(encoder=PoolStats(), kv_total_tokens=1000, **figures)


def test_use_is_the_scarcer_of_requests_and_kv() -> None:
    assert use_of(stats(kv_free_tokens=1000), 64) == 0
    assert use_of(stats(kv_free_tokens=1000, num_running_reqs=16), 64) == 0.25
    assert use_of(stats(kv_free_tokens=250, num_running_reqs=16), 64) == 0.75


def test_cached_kv_that_no_request_needs_is_not_in_use() -> None:
    assert use_of(stats(kv_free_tokens=0, kv_cached_tokens=1000), 64) == 0
    assert use_of(stats(kv_free_tokens=0, kv_cached_tokens=1000, kv_locked_tokens=400), 64) == pytest.approx(0.4)


def test_requests_that_wait_count_as_if_they_ran() -> None:
    assert use_of(stats(kv_free_tokens=1000, num_running_reqs=4, num_waiting_reqs=4), 4) == 2.0
    assert use_of(stats(kv_free_tokens=100, num_running_reqs=2, num_waiting_reqs=4), 64) == pytest.approx(2.7)
    assert use_of(stats(kv_free_tokens=1000, num_waiting_reqs=64), 64) == pytest.approx(65 / 64)


def test_the_number_of_replicas_follows_their_use() -> None:
    assert wanted([0.0], 1) == 1
    assert wanted([1.0], 1) == 1
    assert wanted([1.1], 1) == 2
    assert wanted([5.0], 1) == 5
    assert wanted([0.6, 0.6], 2) == 2
    assert wanted([0.1, 0.0], 2) == 1
    assert wanted([0.1, 0.0, 0.0], 3) == 1


def test_a_replica_stays_while_the_others_would_be_nearly_full() -> None:
    assert wanted([0.48, 0.47], 2) == 2
    assert wanted([0.44, 0.44], 2) == 1


@dataclass
class Context:
    target_num_replicas: int
    aggregated_metrics: dict[str, dict[str, float]] = field(default_factory=dict)


def test_the_policy_waits_for_figures() -> None:
    silent: Any = Context(3)
    assert by_use(silent) == (3, {})
    full: Any = Context(1, {USE: {"a": 2.5}})
    assert by_use(full) == (3, {})
