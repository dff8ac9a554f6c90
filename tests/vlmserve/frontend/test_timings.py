"""The two halves of an answer's times, put together."""

from __future__ import annotations

from typing import Any

import pytest

from vlmserve.frontend.request_stats import AnswerTimes, Moments, Timings
from vlmserve.ipc.messages import StageTimes


def stages(**fields: Any) -> StageTimes:
    known = {"queue_s": 1.0, "encode_s": 2.0, "encode_cached": False, "prefill_s": 3.0, "decode_s": 0.0, "total_s": 6.0}
    return StageTimes(**{**known, **fields})


def prepared() -> AnswerTimes:
    return AnswerTimes(Moments(started=10.0, load_began=10.5, fetched=12.5, prepared=13.0))


def test_all_of_them() -> None:
    times = prepared()
    assert times.output(19.25, stages(), tokens=1) is None
    assert times.output(20.25, None, tokens=1) == 1.0
    assert times.output(21.0, stages(decode_s=1.75, total_s=7.75), tokens=0) is None
    assert times.timings(21.0) == Timings(
        prepare_s=3.0,
        fetch_s=2.0,
        preprocess_s=0.5,
        queue_s=1.25,  # a quarter on the way to the scheduler and back
        encode_s=2.0,
        encode_cached=False,
        prefill_s=3.0,
        decode_s=1.75,
        first_token_s=9.25,
        total_s=11.0,
    )


def test_a_stop_string_ends_it_without_the_scheduler() -> None:
    times = prepared()
    times.output(19.0, stages(), tokens=1)
    times.output(23.0, None, tokens=1)
    assert times.timings(23.0, ended_here=True).decode_s == 4.0


@pytest.mark.parametrize(("sent", "prepare_s"), [(11.0, 1.0), (None, 2.0)])
def test_one_that_ended_before_its_first_token(sent: float | None, prepare_s: float) -> None:
    times = AnswerTimes(Moments(started=10.0, prepared=sent))
    times.output(11.5, None, tokens=0)
    assert times.timings(12.0, ended_here=True) == Timings(prepare_s=prepare_s, total_s=2.0)
