"""What the real scheduler has counted, over a fake worker and a clock that moves one second a step."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vlmserve.scheduler.test_scheduler import Knobs, Rig, request
from vlmserve.ipc.messages import AbortReq, BatchTokenOutput, StageTimes, StepStats
from vlmserve.scheduler.meter import Histogram


class TimedRig(Rig):
    """Keeps what requests' outputs say of their stages; each step takes a second."""

    def __init__(self, knobs: Knobs) -> None:
        self.now = 0.0
        self.stages: dict[str, list[StageTimes | None]] = {}
        super().__init__(knobs)
        self.scheduler.intake._clock = lambda: self.now

    def take(self, message: BatchTokenOutput) -> None:
        super().take(message)
        for output in message.outputs:
            self.stages.setdefault(output.rid, []).append(output.stages)

    def step(self) -> bool:
        self.now += 1.0
        return super().step()

    @property
    def counted(self) -> StepStats:
        return self.scheduler.stats().steps


def test_stages_come_with_the_first_and_the_last_output() -> None:
    rig = TimedRig(Knobs())
    rig.scheduler.handle(request("a", [1, 2, 3], new=4))
    rig.run()
    first, *between, last = rig.stages["a"]
    assert between == [None, None]
    assert (first.queue_s, first.encode_s, first.prefill_s, first.decode_s, first.total_s) == (1.0, None, 0.0, 0.0, 1.0)
    assert (last.queue_s, last.prefill_s, last.decode_s, last.total_s) == (1.0, 0.0, 3.0, 4.0)


def test_encoding_waiting_and_chunks() -> None:
    rig = TimedRig(Knobs(encoders=1, chunk=4, page=4))
    rig.scheduler.handle(request("a", list(range(12)), [(0, 2, b"aa")], new=2))
    for _ in range(3):
        rig.step()
    assert rig.counted.encoding_reqs == 1
    rig.encode()
    rig.run()
    assert rig.counted.encoding_reqs == 0
    last = rig.stages["a"][-1]
    assert (last.encode_s, last.encode_cached, last.queue_s) == (4.0, False, 0.0)
    assert (last.prefill_s, last.decode_s) == (2.0, 1.0), "three chunks, then another token"


def test_embeddings_that_are_there_are_cached() -> None:
    rig = TimedRig(Knobs(radix=False))
    for rid in "ab":
        rig.scheduler.handle(request(rid, list(range(6)), [(0, 2, b"aa")], new=1))
        rig.run()
    assert [rig.stages[rid][-1].encode_cached for rid in "ab"] == [False, True]


def test_a_picture_in_a_cached_prefix_is_not_waited_for() -> None:
    rig = TimedRig(Knobs(page=4))
    for rid in "ab":
        rig.scheduler.handle(request(rid, list(range(12)), [(0, 2, b"aa")], new=1))
        rig.run()
    assert rig.stages["b"][-1].encode_s is None
    assert (rig.counted.prefix_queries_total, rig.counted.prefix_hits_total) == (24, 8)
    assert rig.counted.prompt_tokens_computed_total == 12 + 4


def test_who_is_aborted_waits_for_no_encoder() -> None:
    rig = TimedRig(Knobs(encoders=1))
    rig.scheduler.handle(request("a", list(range(6)), [(0, 2, b"aa")]))
    rig.step()
    assert rig.counted.encoding_reqs == 1
    rig.scheduler.handle(AbortReq(rid="a"))
    assert rig.counted.encoding_reqs == 0
    (only,) = rig.stages["a"]
    assert (only.encode_s, only.prefill_s, only.total_s) == (1.0, None, 1.0)
    rig.encode()
    rig.run()


def test_retractions_are_counted_and_told() -> None:
    rig = TimedRig(Knobs(pool=64, page=4, chunk=None, rows=6, context=64, radix=False, conservativeness=0.0))
    for place in range(5):
        rig.scheduler.handle(request(f"r{place}", [place] * 6, new=40))
    rig.run()
    stats = rig.scheduler.stats()
    told = sum(stages[-1].retractions for stages in rig.stages.values())
    assert told == stats.steps.preempted_total >= stats.retracted_total > 0


def test_steps() -> None:
    rig = TimedRig(Knobs(chunk=64))
    for rid in "ab":
        rig.scheduler.handle(request(rid, [ord(rid)] * 10, new=3))
    rig.run()
    reqs, tokens = rig.counted.step_reqs, rig.counted.step_tokens
    assert sum(reqs.counts) == sum(tokens.counts) == rig.scheduler.stats().forward_steps_total
    assert tokens.sum == rig.counted.prompt_tokens_computed_total + 2 * 2, "prompts, then two more tokens for each"


@pytest.mark.parametrize(("value", "place"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (5, 3)])
def test_a_bound_belongs_to_its_bucket(value: int, place: int) -> None:
    histogram = Histogram((1, 2, 4))
    histogram.add(value)
    stats: Any = histogram.stats()
    assert [index for index, count in enumerate(stats.counts) if count] == [place]
    assert stats.sum == value
