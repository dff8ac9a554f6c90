"""Where a clip is cut to be decoded side by side."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from processors.video.stretches import stretches


def test_as_many_as_there_are_threads_and_about_as_long():
    indices = range(0, 1800, 15)
    keys = range(0, 1800, 180)
    assert stretches(indices, keys, multiple=2, most=2) == [range(60), range(60, 120)]
    # keyframes every 12 frames that are used; quarters of 120 would begin at 30, 60 and 90
    found = stretches(indices, keys, multiple=2, most=4)
    assert found[0].start == 0
    assert found[-1].stop == 120
    assert all(part.start % 12 <= 2 for part in found), "at a keyframe or soon behind one"
    assert all(24 <= len(part) <= 36 for part in found)


def test_a_stretch_begins_near_a_keyframe_though_it_is_not_the_middle():
    assert stretches(range(100), [0, 44], multiple=2, most=2) == [range(44), range(44, 100)]
    # the first pair behind the keyframe
    assert stretches(range(100), [0, 43], multiple=2, most=2) == [range(44), range(44, 100)]


def test_one_where_more_would_not_help():
    whole = [range(100)]
    assert stretches(range(100), [0], multiple=2, most=4) == whole, "both would decode the first half"
    assert stretches(range(100), [0, 90], multiple=2, most=4) == whole, "the second would be done at once"
    assert stretches(range(100), [0, 50], multiple=2, most=1) == whole
    assert stretches(range(20), [0, 10], multiple=2, most=4) == [range(20)], "to open the file again would cost more"
    assert stretches([7], [0, 5], multiple=2, most=4) == [range(1)]
    sparse = range(0, 10_000, 1000)  # each by its own keyframe: ten frames in all
    assert stretches(sparse, range(0, 10_000, 10), multiple=2, most=4) == [range(10)]


def test_fewer_where_there_are_too_few_keyframes():
    assert stretches(range(100), [0, 50], multiple=2, most=4) == [range(50), range(50, 100)]


@given(
    steps=st.lists(st.integers(0, 40), min_size=1, max_size=120),
    gaps=st.lists(st.integers(1, 90), max_size=30),
    multiple=st.integers(1, 3),
    most=st.integers(1, 5),
)
def test_stretches_hold_every_place_once_and_whole_temporal_patches(steps, gaps, multiple, most):
    indices = [sum(steps[: place + 1]) for place in range(len(steps))]
    keys = [sum(gaps[:place]) for place in range(len(gaps) + 1)]
    found = stretches(indices, keys, multiple=multiple, most=most)
    assert 1 <= len(found) <= most
    assert [place for part in found for place in part] == list(range(len(indices)))
    assert all(found)
    assert all(len(part) % multiple == 0 for part, _ in pairwise(found))
