"""Frames of streams with times, without them, and with the first one missing."""

from itertools import count
from types import SimpleNamespace

import pytest

from processors.video.pulling import thinned


@pytest.mark.parametrize(
    ("times", "want"),
    [
        ([5.0, 5.1, 5.5, 5.9, 6.0], [0.0, 0.5, 1.0]),
        ([None, 0.1, 0.2, None, 0.6, 1.1], [0.0, 0.5, 1.0]),
        ([None, None, None, 7.0], [0.0, 1.0, 2.0, 3.0]),
        ([None], [0.0]),
        ([], []),
    ],
)
def test_frames_have_times_by_one_clock(times, want):
    ticks = count(100)
    frames = [SimpleNamespace(time=one) for one in times]
    assert [at for at, _ in thinned(frames, 2, lambda: float(next(ticks)))] == pytest.approx(want)
