"""What the real scheduler has counted, over a fake worker and a clock that moves one second a step."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vlmserve.scheduler.prompts import request
from tests.vlmserve.scheduler.rig import Knobs, Rig
from vlmserve.ipc.messages import AbortReq, StageTimes, StepStats
from vlmserve.scheduler.meter import Histogram


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


def test_who_is_aborted_waits_for_no_encoder() -> None:
    rig = Rig(Knobs(encoders=1))
    rig.handle(request("a", list(range(6)), [(0, 2, b"aa")]))
    rig.step()
    assert counted(rig).encoding_reqs == 1
    rig.handle(AbortReq(rid="a"))
    assert counted(rig).encoding_reqs == 0
    (only,) = stages(rig, "a")
    assert (only.encode_s, only.prefill_s, only.total_s) == (1.0, None, 1.0)
    rig.encode()
    rig.run()


def test_retractions_are_counted_and_told() -> None:
    rig = Rig(Knobs(pool=64, page=4, chunk=None, rows=6, context=64, radix=False, conservativeness=0.0))
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
