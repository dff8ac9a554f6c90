"""Calls side by side: as many at a time as told, the first failure in order, nothing left running."""

from __future__ import annotations

import queue
import threading
from contextlib import closing

import pytest

from processors.video import side_by_side as module
from processors.video.side_by_side import side_by_side

WAIT_S = 20.0  # a bound for waits on other threads, never waited for when all is well


def nothing():
    pass


def fail(place):
    raise ValueError(f"call {place}")


@pytest.fixture
def opened_later(monkeypatch):
    """An event that is set once the first call that ends has been looked at."""
    event = threading.Event()

    class WatchedQueue(queue.SimpleQueue):
        def __init__(self):
            super().__init__()
            self.asked = 0

        def get(self):
            self.asked += 1
            if self.asked == 2:
                event.set()
            return super().get()

    monkeypatch.setattr(module, "SimpleQueue", WatchedQueue)
    return event


def test_results_come_with_their_places():
    assert sorted(side_by_side([lambda n=n: n * n for n in range(20)], 3, nothing)) == [(n, n * n) for n in range(20)]
    assert list(side_by_side([], 3, nothing)) == []


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

    assert len(list(side_by_side([call] * 9, 3, nothing))) == 9
    assert max(seen) == 3


def test_the_first_failure_in_order_counts_not_the_first_in_time(opened_later):
    def late():
        assert opened_later.wait(WAIT_S)
        fail(0)

    with pytest.raises(ValueError, match="call 0"):
        list(side_by_side([late, lambda: fail(1)], 2, opened_later.set))


def test_what_comes_before_a_failure_still_counts(opened_later):
    def late():
        assert opened_later.wait(WAIT_S)
        return "first"

    found = side_by_side([late, lambda: fail(1), nothing], 2, opened_later.set)
    assert next(found) == (0, "first")
    with pytest.raises(ValueError, match="call 1"):
        next(found)


def test_calls_begin_in_the_order_told_and_keep_their_places():
    begun = []
    found = side_by_side([lambda n=n: begun.append(n) or n for n in range(4)], 1, nothing, [2, 0, 3, 1])
    assert list(found) == [(2, 2), (0, 0), (3, 3), (1, 1)]
    assert begun == [2, 0, 3, 1]


def test_a_call_before_the_one_that_failed_is_made_though_it_was_to_begin_later():
    begun = []
    calls = [lambda: begun.append(0), lambda: begun.append(1) or fail(1), lambda: begun.append(2)]
    with pytest.raises(ValueError, match="call 1"):
        list(side_by_side(calls, 1, nothing, [1, 2, 0]))
    assert begun == [1, 0]


def test_a_failure_calls_off_the_rest():
    called_off, begun = threading.Event(), []
    calls = [lambda: fail(0), lambda: called_off.wait(WAIT_S), *[lambda: begun.append(1)] * 5]
    with pytest.raises(ValueError, match="call 0"):
        list(side_by_side(calls, 1, called_off.set))
    assert begun == []


def test_nothing_more_begins_behind_a_failure_while_earlier_calls_go_on(opened_later):
    begun = []

    def slow():
        assert opened_later.wait(WAIT_S)

    calls = [slow, lambda: fail(1), slow, *[lambda: begun.append(1)] * 1000]
    with pytest.raises(ValueError, match="call 1"):
        list(side_by_side(calls, 2, nothing))
    assert begun == []


def test_closing_calls_off_the_rest_and_waits_for_what_is_under_way():
    under_way, called_off, ended, begun = threading.Event(), threading.Event(), [], []

    def slow():
        under_way.set()
        assert called_off.wait(WAIT_S)
        ended.append(1)

    with closing(side_by_side([nothing, slow, *[lambda: begun.append(1)] * 5], 1, called_off.set)) as found:
        assert next(found) == (0, None)
        assert under_way.wait(WAIT_S)
    assert (ended, begun) == ([1], [])
