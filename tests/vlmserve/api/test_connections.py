"""Who has to go, and when: connections that wait, and clients that do not read."""

from __future__ import annotations

import pytest

from vlmserve.api.connections import SPARE, ConnectionLimits, Connections


class FakeConnection:
    def __init__(self, house: House) -> None:
        self.house = house
        self.ended: list[str] = []
        self.stuck = False

    def end(self, how: str) -> None:
        self.ended.append(how)
        self.house.open.discard(self)
        self.house.guard.forget(self)

    def drop(self) -> None:
        self.end("drop")

    def give_up(self) -> None:
        self.end("give up")

    def cut(self) -> None:
        self.end("cut")


class House:
    def __init__(self) -> None:
        self.now = 0.0
        self.open: set[FakeConnection] = set()
        limits = ConnectionLimits(most=2, header_timeout_s=10, send_timeout_s=60)
        self.guard = Connections(limits, self.open, clock=lambda: self.now)

    def connect(self) -> tuple[FakeConnection, bool]:
        new = FakeConnection(self)
        self.open.add(new)
        return new, self.guard.admit(new)


@pytest.fixture
def house() -> House:
    return House()


def test_the_one_that_waits_longest_makes_room(house: House) -> None:
    first, second, *_ = there = [house.connect()[0] for _ in range(2 + SPARE)]
    assert [each.ended for each in there] == [[]] * len(there)
    house.guard.works(first)
    assert house.connect()[1]
    assert (first.ended, second.ended) == ([], ["drop"])


def test_an_answered_one_waits_again(house: House) -> None:
    first, *others = [house.connect()[0] for _ in range(2 + SPARE)]
    house.guard.works(first)
    house.guard.idles(first)
    house.connect()
    assert (first.ended, others[0].ended) == ([], ["drop"]), "it has not waited as long as the rest"


def test_silent_ones_keep_nobody_from_working(house: House) -> None:
    there = [house.connect()[0] for _ in range(2 + SPARE)]
    house.guard.works(there[-1])
    house.guard.works(there[-2])
    assert not house.guard.crowded
    house.guard.works(there[-3])
    assert house.guard.crowded


def test_there_is_an_end_to_it(house: House) -> None:
    for _ in range(2 + SPARE):
        house.guard.works(house.connect()[0])
    assert house.connect()[1] is False


def test_headers_have_their_time(house: House) -> None:
    silent, worker, idle = (house.connect()[0] for _ in range(3))
    house.guard.works(worker)
    house.guard.works(idle)
    house.guard.idles(idle)
    house.now = 9.9
    house.guard.sweep()
    assert silent.ended == []
    house.now = 10
    house.guard.reads_headers(idle)
    house.guard.sweep()
    assert (silent.ended, worker.ended, idle.ended) == (["give up"], [], [])
    house.now = 20
    house.guard.sweep()
    assert (worker.ended, idle.ended) == ([], ["give up"])


def test_who_does_not_read_is_cut_and_who_reads_slowly_is_not(house: House) -> None:
    stuck, slow = (house.connect()[0] for _ in range(2))
    for each in (stuck, slow):
        house.guard.works(each)
        each.stuck = True
    for house.now in (0, 30, 59):
        house.guard.sweep()
    house.guard.moves(slow)
    house.now = 60
    house.guard.sweep()
    assert (stuck.ended, slow.ended) == (["cut"], [])
    house.now = 120
    house.guard.sweep()
    assert slow.ended == ["cut"]
