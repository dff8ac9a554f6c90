"""Calls side by side: as many at a time as told, the first failure in order, nothing left running."""

from __future__ import annotations

import threading

import pytest

from processors.video.threads import side_by_side

WAIT_S = 20.0  # a bound for waits on other threads, never waited for when all is well


def nothing():
    pass


def fail(place):
    raise ValueError(f"call {place}")


def test_results_come_in_order():
    calls = [lambda n=n: n * n for n in range(20)]
    assert side_by_side(calls, 3, nothing, range(20)) == [n * n for n in range(20)]
    assert side_by_side([], 3, nothing, ()) == []


def test_as_many_at_a_time_as_told_and_no_more():
    together = threading.Barrier(3, timeout=WAIT_S)
    lock, inside, seen = threading.Lock(), 0, []

    def call():
        nonlocal inside
        with lock:
            inside += 1
            seen.append(inside)
        together.wait()  # all three of a round are here
        with lock:
            inside -= 1
        together.wait()

    assert side_by_side([call] * 9, 3, nothing, range(9)) == [None] * 9
    assert max(seen) == 3


def test_the_first_failure_in_order_counts_not_the_first_in_time():
    with pytest.raises(ValueError, match="call 0"):
        side_by_side([lambda: fail(0), lambda: fail(1)], 1, nothing, [1, 0])


def test_calls_begin_in_the_order_told_and_keep_their_places():
    begun = []
    calls = [lambda n=n: begun.append(n) or n for n in range(4)]
    assert side_by_side(calls, 1, nothing, [2, 0, 3, 1]) == [0, 1, 2, 3]
    assert begun == [2, 0, 3, 1]


def test_a_call_before_the_one_that_failed_is_made_though_it_was_to_begin_later():
    begun = []
    calls = [lambda: begun.append(0), lambda: begun.append(1) or fail(1), lambda: begun.append(2)]
    with pytest.raises(ValueError, match="call 1"):
        side_by_side(calls, 1, nothing, [1, 2, 0])
    assert begun == [1, 0]


def test_a_failure_calls_off_the_rest():
    called_off, begun = threading.Event(), []
    calls = [lambda: fail(0), lambda: called_off.wait(WAIT_S), *[lambda: begun.append(1)] * 5]
    with pytest.raises(ValueError, match="call 0"):
        side_by_side(calls, 1, called_off.set, range(len(calls)))
    assert begun == []


def test_a_failure_waits_for_what_is_under_way():
    under_way, called_off, ended = threading.Event(), threading.Event(), []

    def broken():
        assert under_way.wait(WAIT_S)
        fail(0)

    def slow():
        under_way.set()
        assert called_off.wait(WAIT_S)
        ended.append(1)

    with pytest.raises(ValueError, match="call 0"):
        side_by_side([broken, slow], 2, called_off.set, range(2))
    assert ended == [1]
