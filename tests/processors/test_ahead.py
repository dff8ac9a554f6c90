"""Things made ahead in a thread: in order, as many as there is room for, errors in their place, nothing left behind."""

from __future__ import annotations

import threading

import pytest

from processors.video.threads import ahead


class Source:
    """Counts what was made; `made[n]` is set when thing number n was."""

    def __init__(self, length: int, fail_at: int | None = None) -> None:
        self.made = [threading.Event() for _ in range(length + 1)]
        self.closed = False
        self.thread: threading.Thread | None = None
        self.length, self.fail_at = length, fail_at

    def __iter__(self):
        self.thread = threading.current_thread()
        try:
            for number in range(self.length):
                if number == self.fail_at:
                    raise ValueError(f"number {number}")
                self.made[number].set()
                yield number
        finally:
            self.closed = True

    def over(self) -> bool:
        return self.closed and not self.thread.is_alive()


def test_all_come_in_order():
    source = Source(50)
    assert list(ahead(iter(source))) == list(range(50))
    assert source.over()


def test_as_many_are_made_ahead_as_there_is_room_for():
    source = Source(9)
    items = ahead(iter(source), 2)
    assert next(items) == 0
    assert source.made[1].wait(10)
    assert not source.made[2].wait(0.05), "one is in use, one is ready"
    assert next(items) == 1
    assert source.made[2].wait(10)
    items.close()
    assert source.over()


def test_an_error_comes_where_it_belongs():
    source = Source(9, fail_at=3)
    items = ahead(iter(source))
    assert [next(items) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="number 3"):
        next(items)
    assert source.over()


def test_who_gives_up_leaves_nothing_behind():
    source = Source(1000)
    items = ahead(iter(source))
    assert next(items) == 0
    items.close()
    assert source.over()
