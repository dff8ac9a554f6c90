"""What the real loop has counted, over a fake worker and a clock that moves one second a step; and the log's lines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.vlmserve.api.fake_engine import make_stats
from tests.vlmserve.scheduler.prompts import request
from tests.vlmserve.scheduler.rig import Knobs, Rig
from vision.cache.stats import PoolStats
from vlmserve.ipc.messages import AbortReq, Guesses, SchedulerStats, StageTimes, StepStats
from vlmserve.scheduler.meter import BatchLog, Histogram, describe
from vlmserve.scheduler.req_life import ReqTimes


def counted(rig: Rig) -> StepStats:
    return rig.loop.stats().steps


def stages(rig: Rig, rid: str) -> list[StageTimes | None]:
    return [output.stages for output in rig.outputs[rid]]


def test_stages_come_with_the_first_and_the_last_output() -> None:
    rig = Rig()
    rig.run(request("a", [1, 2, 3], new=4))
    first, *between, last = stages(rig, "a")
    assert between == [None, None]
    assert (first.queue_s, first.encode_s, first.prefill_s, first.decode_s, first.total_s) == (1.0, None, 0.0, 0.0, 1.0)
    assert (last.queue_s, last.prefill_s, last.decode_s, last.total_s) == (1.0, 0.0, 3.0, 4.0)


def test_encoding_waiting_and_chunks() -> None:
    rig = Rig(Knobs(encoders=1, chunk=4, page=4))
    rig.handle(request("a", list(range(12)), [(0, 2, b"aa")], new=2))
    for _ in range(3):
        rig.step()
    assert counted(rig).encoding_reqs == 1
    rig.encode()
    rig.run()
    assert counted(rig).encoding_reqs == 0
    last = stages(rig, "a")[-1]
    assert (last.encode_s, last.encode_cached, last.queue_s) == (4.0, False, 0.0)
    assert (last.prefill_s, last.decode_s) == (2.0, 1.0), "three chunks, then another token"
    rig.handle(request("b", list(range(20, 26)), [(0, 2, b"bb")]))
    rig.step()
    rig.handle(AbortReq(rid="b"))
    assert counted(rig).encoding_reqs == 0
    (only,) = stages(rig, "b")
    assert (only.encode_s, only.prefill_s, only.total_s) == (1.0, None, 1.0)
    rig.encode()
    rig.run()


def test_a_prompt_that_begins_before_its_last_picture_is_ready_did_not_queue() -> None:
    rig = Rig(Knobs(encoders=1, chunk=None, context=700, pool=800))
    rig.handle(request("a", [1] * 350, [(300, 12, b"aa")], new=1))
    for _ in range(4):
        rig.step()
    rig.encode()
    rig.run()
    last = stages(rig, "a")[-1]
    assert (last.encode_s, last.queue_s, last.prefill_s, last.decode_s) == (5.0, 0.0, 4.0, 0.0)


def test_embeddings_that_are_there_are_cached() -> None:
    rig = Rig(Knobs(radix=False))
    for rid in "ab":
        rig.run(request(rid, list(range(6)), [(0, 2, b"aa")], new=1))
    assert [stages(rig, rid)[-1].encode_cached for rid in "ab"] == [False, True]


def test_a_picture_in_a_cached_prefix_is_not_waited_for() -> None:
    rig = Rig(Knobs(page=4))
    for rid in "ab":
        rig.run(request(rid, list(range(12)), [(0, 2, b"aa")], new=1))
    assert stages(rig, "b")[-1].encode_s is None
    assert (counted(rig).prefix_queries_total, counted(rig).prefix_hits_total) == (24, 8)
    assert counted(rig).prompt_tokens_computed_total == 12 + 4


def test_retractions_are_counted_and_told() -> None:
    rig = Rig(Knobs(pool=64, page=4, chunk=None, rows=6, context=64, radix=False, conservativeness=0.001))
    rig.run(*(request(f"r{place}", [place] * 6, new=40) for place in range(5)))
    stats = rig.loop.stats()
    told = sum(stages(rig, rid)[-1].retractions for rid in rig.outputs)
    assert told == stats.steps.preempted_total >= stats.retracted_total > 0


def test_steps() -> None:
    rig = Rig(Knobs(chunk=64))
    rig.run(*(request(rid, [ord(rid)] * 10, new=3) for rid in "ab"))
    reqs, tokens = counted(rig).step_reqs, counted(rig).step_tokens
    assert sum(reqs.counts) == sum(tokens.counts) == rig.loop.stats().forward_steps_total
    assert tokens.sum == counted(rig).prompt_tokens_computed_total + 2 * 2, "prompts, then two more tokens for each"


@pytest.mark.parametrize(("value", "place"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_a_bound_belongs_to_its_bucket(value: int, place: int) -> None:
    histogram = Histogram((1, 2, 4))
    histogram.add(value)
    stats: Any = histogram.stats()
    assert [index for index, count in enumerate(stats.counts) if count] == [place]
    assert stats.sum == value


def test_retracted_time_belongs_to_its_stage_and_events_count_once() -> None:
    now = 100.0
    times = ReqTimes(lambda: now)
    times.arrived(encodes=True)
    for cached in (True, False):
        times.encoded(cached=cached)
        times.prefill_began()
        now += 1.0
        times.first_token()
        now += 2.0
        times.retracted()
        now += 3.0
    got = times.so_far()
    assert (got.encode_s, got.encode_cached, got.prefill_s, got.decode_s) == (0.0, True, 1.0, 11.0)
    assert got.retractions == 2


class Logged:
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
    logged = Logged(10.0)
    for _ in range(31):
        logged.turn(1.0)
    assert len(logged.lines) == 3
    assert logged.asked == 1 + 3, "once to begin with, once for each line"
    logged = Logged(0.0)
    logged.turn(1.0)
    assert (logged.lines, logged.asked) == ([], 0)


def test_time_without_requests_does_not_count() -> None:
    logged = Logged(10.0)
    for start in range(4):
        logged.turn(1000.0)
        logged.figures = replace(logged.figures, generation_tokens_total=30 * (start + 1))
        logged.turn(3.0, idle=True)
    assert len(logged.lines) == 1
    assert "10.0 tokens/s" in logged.lines[0], "120 tokens in 12 s of work"


def test_what_it_says() -> None:
    before, earlier = make_stats(generation_tokens_total=100), Guesses(steps=2, tokens=8, right_at=(2, 2))
    before = replace(before, steps=StepStats(prefix_queries_total=1000, prefix_hits_total=1000, guesses=earlier))
    now = make_stats(num_running_reqs=3, num_waiting_reqs=2, generation_tokens_total=350)
    steps = StepStats(
        encoding_reqs=1,
        preempted_total=4,
        prompt_tokens_computed_total=600,
        prefix_queries_total=1800,
        prefix_hits_total=1200,
        guesses=Guesses(steps=17, tokens=48, right_at=(16, 12, 6)),
    )
    now = replace(now, encoder=PoolStats(encoded=7), steps=steps)
    assert describe(before, now, 10.0) == (
        "3 running, 2 queued, 1 waiting for the encoder, KV 30%, prefix hits 25%, 60.0 prompt tokens/s, 25.0 tokens/s, "
        "7 pictures encoded, 4 retracted, 30 of 40 guesses right (14, 10, 6 by position), accepted length 3.00"
    )
    assert "prefix hits -," in describe(now, now, 10.0)
