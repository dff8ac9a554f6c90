"""Work that several ask for at the same time is done once, and its failures are each one's own."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from processors.in_flight import InFlight


class Key:
    """Tells when it is looked up, which happens under the lock that the removal of finished work needs, too."""

    def __init__(self):
        self.asked = threading.Semaphore(0)

    def __hash__(self):
        self.asked.release()
        return 1

    def wait(self, times):
        for _ in range(times):
            assert self.asked.acquire(timeout=20)


def run(first, second):
    """Two threads: the second one asks while the first one works. What each got, or raised."""
    in_flight, key = InFlight(), Key()
    working, go_on = threading.Event(), threading.Event()

    def slow():
        working.set()
        assert go_on.wait(20)
        return first()

    with ThreadPoolExecutor(2) as threads:
        a = threads.submit(in_flight.share, key, slow)
        assert working.wait(20)
        key.wait(2)  # looked up, and noted
        b = threads.submit(in_flight.share, key, second)
        key.wait(1)
        go_on.set()
        results = [future.exception(20) or future.result() for future in (a, b)]
    assert in_flight.share(key, lambda: "afterwards") == "afterwards"
    return results


def test_who_comes_later_gets_what_is_being_made():
    made = object()
    assert run(lambda: made, lambda: pytest.fail("made again")) == [made, made]


def test_who_waited_in_vain_tries_alone():
    def fail():
        raise ValueError("of the first")

    first, second = run(fail, lambda: "made")
    assert str(first) == "of the first"
    assert second == "made"


def test_other_keys_do_not_wait():
    in_flight = InFlight()
    assert in_flight.share("a", lambda: in_flight.share("b", lambda: 2)) == 2
