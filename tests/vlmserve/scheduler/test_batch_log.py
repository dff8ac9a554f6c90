"""The line about batches: when it comes, what it says, and that nothing is gathered between."""

from __future__ import annotations

from dataclasses import replace

from tests.vlmserve.api.fake_engine import make_stats
from vision.cache.stats import PoolStats
from vlmserve.ipc.messages import SchedulerStats, StepStats
from vlmserve.scheduler.meter import BatchLog, describe


class Engine:
    """A clock, figures, and how often these were asked for."""

    def __init__(self, interval_s: float) -> None:
        self.now = 0.0
        self.asked = 0
        self.figures = make_stats()
        self.lines: list[str] = []
        self.log = BatchLog(interval_s, clock=lambda: self.now, write=self.lines.append)

    def stats(self) -> SchedulerStats:
        self.asked += 1
        return self.figures

    def turn(self, seconds: float, *, idle: bool = False) -> None:
        self.now += seconds
        self.log.step(self.stats, idle=idle)


def test_a_line_for_every_interval_of_work() -> None:
    engine = Engine(10.0)
    for _ in range(31):
        engine.turn(1.0)
    assert len(engine.lines) == 3
    assert engine.asked == 1 + 3, "once to begin with, once for each line"


def test_time_without_requests_does_not_count() -> None:
    engine = Engine(10.0)
    for start in range(4):
        engine.turn(1000.0)
        engine.figures = replace(engine.figures, generation_tokens_total=30 * (start + 1))
        engine.turn(3.0, idle=True)
    assert len(engine.lines) == 1
    assert "10.0 tokens/s" in engine.lines[0], "120 tokens in 12 s of work"


def test_none_at_0() -> None:
    engine = Engine(0.0)
    for _ in range(100):
        engine.turn(1.0)
    assert (engine.lines, engine.asked) == ([], 0)


def test_what_it_says() -> None:
    before = make_stats(generation_tokens_total=100)
    before = replace(before, steps=StepStats(prefix_queries_total=1000, prefix_hits_total=1000))
    now = make_stats(num_running_reqs=3, num_waiting_reqs=2, generation_tokens_total=350)
    steps = StepStats(
        encoding_reqs=1,
        preempted_total=4,
        prompt_tokens_computed_total=600,
        prefix_queries_total=1800,
        prefix_hits_total=1200,
    )
    now = replace(now, encoder=PoolStats(encoded=7), steps=steps)
    assert describe(before, now, 10.0) == (
        "3 running, 2 queued, 1 waiting for the encoder, KV 30%, prefix hits 25%, 60.0 prompt tokens/s, 25.0 tokens/s, "
        "7 pictures encoded, 4 retracted"
    )
    assert "prefix hits -," in describe(now, now, 10.0)
