"""The stages of a request, by a clock that only the test moves."""

from __future__ import annotations

import pytest

from vlmserve.ipc.messages import StageTimes
from vlmserve.scheduler.req_life import ReqTimes


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_all_stages_in_order(clock: Clock) -> None:
    times = ReqTimes(clock)
    times.arrived(encodes=True)
    for seconds, event in (
        (1.0, lambda: times.encoded(cached=False)),
        (2.0, times.prefill_began),
        (4.0, times.prefill_began),  # its second chunk
        (8.0, times.first_token),
    ):
        clock.now += seconds
        event()
    clock.now += 16.0
    assert times.so_far() == StageTimes(
        encode_s=1.0, encode_cached=False, queue_s=2.0, prefill_s=12.0, decode_s=16.0, total_s=31.0
    )


def test_text_has_no_encode(clock: Clock) -> None:
    times = ReqTimes(clock)
    times.arrived(encodes=False)
    clock.now += 3.0
    times.prefill_began()
    assert times.so_far() == StageTimes(
        encode_s=None, encode_cached=None, queue_s=3.0, prefill_s=0.0, decode_s=None, total_s=3.0
    )


def test_a_prompt_that_begins_before_its_last_picture_is_ready_did_not_queue(clock: Clock) -> None:
    times = ReqTimes(clock)
    times.arrived(encodes=True)
    clock.now += 1.0
    times.prefill_began()
    clock.now += 4.0
    times.encoded(cached=False)
    clock.now += 1.0
    times.first_token()
    got = times.so_far()
    assert (got.encode_s, got.queue_s, got.prefill_s, got.decode_s) == (5.0, 0.0, 5.0, 0.0)


def test_one_that_ends_early_has_the_stages_that_it_came_to(clock: Clock) -> None:
    times = ReqTimes(clock)
    times.arrived(encodes=True)
    clock.now += 2.0
    got = times.so_far()
    assert (got.encode_s, got.queue_s, got.prefill_s, got.decode_s, got.total_s) == (2.0, 0.0, None, None, 2.0)


def test_retracted_time_belongs_to_its_stage_and_events_count_once(clock: Clock) -> None:
    times = ReqTimes(clock)
    times.arrived(encodes=True)
    times.encoded(cached=True)
    times.prefill_began()
    clock.now += 1.0
    times.first_token()
    clock.now += 2.0
    times.retracted()
    clock.now += 3.0
    times.encoded(cached=False)
    times.prefill_began()
    clock.now += 4.0
    times.first_token()
    clock.now += 5.0
    got = times.so_far()
    assert (got.encode_s, got.encode_cached, got.prefill_s, got.decode_s) == (0.0, True, 1.0, 14.0)
    assert got.retractions == 1
