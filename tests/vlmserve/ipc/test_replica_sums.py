"""Figures and answers of replicas, as one."""

from __future__ import annotations

from dataclasses import replace

from tests.vlmserve.api.fake_engine import make_stats
from vision.cache.stats import PoolStats, TierStats
from vlmserve.ipc.control_messages import ControlRefused, EngineState, ProfileResult, ServerInfo, sum_results, sum_stats
from vlmserve.ipc.messages import Guesses, HistogramStats, StepStats


def figures(running: int, disk: int):
    steps = StepStats(
        preempted_total=running,
        step_reqs=HistogramStats(bounds=(1,), counts=(running, 1), sum=9),
        guesses=Guesses(steps=running, tokens=9, right_at=(1,) * running),
    )
    encoder = PoolStats(encoded=running, disk=TierStats(hits=running, bytes=disk, entries=disk))
    return replace(make_stats(num_running_reqs=running), steps=steps, encoder=encoder)


def test_figures():
    stats = [figures(2, disk=10), figures(3, disk=11)]
    whole = sum_stats(stats)
    assert (whole.num_running_reqs, whole.kv_total_tokens, whole.steps.preempted_total) == (5, 200, 5)
    assert whole.steps.step_reqs == HistogramStats(bounds=(1,), counts=(5, 2), sum=18)
    assert whole.steps.guesses == Guesses(steps=5, tokens=18, right_at=(2, 2, 1))
    assert (whole.encoder.encoded, whole.encoder.host) == (5, None)
    assert whole.encoder.disk == TierStats(hits=5, bytes=11, entries=11), "the folder is everybody's"
    assert whole.replicas == tuple(stats)
    assert sum_stats(stats[:1]) is stats[0]
    assert stats[0].replicas == ()


def test_answers():
    states = [EngineState(paused=True, num_running_reqs=n, num_waiting_reqs=1, flushed=n + 1) for n in (3, 4)]
    assert sum_results(states) == EngineState(paused=True, num_running_reqs=7, num_waiting_reqs=2, flushed=9)
    profiles = [ProfileResult(path=path, steps=n) for path, n in (("a", 3), ("b", 5))]
    assert sum_results(profiles) == ProfileResult(path="a, b", steps=5)
    infos = [
        ServerInfo(stats=figures(n, disk=0), paused=bool(n), profiling=False, device="cpu", dtype="float32")
        for n in range(2)
    ]
    info = sum_results(infos)
    assert (info.paused, info.profiling, info.device, info.stats.num_running_reqs) == (True, False, "cpu", 1)
    assert len(info.stats.replicas) == 2


def test_a_refusal_counts_for_all():
    done = EngineState(paused=False, flushed=3, num_running_reqs=0, num_waiting_reqs=0)
    refused = ControlRefused(message="no", status=409)
    assert sum_results([done, refused]) == ControlRefused(message="replica 1: no", status=409)
    assert sum_results([refused, refused]) == refused
