"""Who hangs, who was stopped, and who only sleeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmserve.ipc.channels import LOOK_S, Heartbeat, Watchdog, Watched


class House:
    """A watchdog over two processes, by a clock of its own."""

    def __init__(self, folder: Path, timeout_s: float = 10.0) -> None:
        self.now = 100.0
        self.stopped: set[int] = set()
        self.problems: list[str | None] = []
        self.given_up: list[tuple[str, str]] = []
        self.beats = {name: Heartbeat(folder / name) for name in ("scheduler", "detokenizer")}
        self.dog = Watchdog(
            [
                Watched(title=f"the {name} process", pid=pid, heartbeat=Heartbeat(folder / name))
                for pid, name in enumerate(self.beats)
            ],
            timeout_s=timeout_s,
            clock=lambda: self.now,
            suspend=self.problems.append,
            give_up=lambda one, reason: self.given_up.append((one.title, reason)),
            is_stopped=self.stopped.__contains__,
        )

    def look(self, times: int, *, working: bool = False) -> None:
        for _ in range(times):
            if working:
                self.beats["scheduler"].working()
            self.now += LOOK_S
            self.dog.look()


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


def test_who_sleeps_or_gets_on_is_well(house: House) -> None:
    house.look(100)
    house.beats["scheduler"].working()
    house.beats["scheduler"].idle()
    house.look(100)
    house.look(100, working=True)
    assert (house.problems, house.given_up) == ([], [])


@pytest.mark.parametrize("name", ["scheduler", "detokenizer"])
def test_who_is_at_one_turn_for_too_long_is_given_up_once(house: House, name: str) -> None:
    house.beats[name].working()
    house.look(10)  # since the first of these looks it is seen at this turn
    assert house.given_up == []
    house.look(20)
    assert house.given_up == [
        (f"the {name} process", f"the {name} process was at one step for 10 s (setting --watchdog-timeout-s)")
    ]


def test_who_is_stopped_is_reported_soon_and_given_up_late(house: House) -> None:
    house.stopped.add(0)
    house.look(1)
    assert house.problems == []
    house.look(1)
    assert house.problems == ["the scheduler process is stopped (SIGSTOP); it goes on after SIGCONT"]
    assert house.dog.problem == house.problems[0]
    house.stopped.clear()
    house.look(1)
    assert house.problems[1:] == [None]
    assert house.dog.problem is None
    house.stopped.add(1)
    house.look(20)
    assert house.given_up == [
        ("the detokenizer process", "the detokenizer process was stopped for 10 s (setting --watchdog-timeout-s)")
    ]


def test_no_timeout_is_for_ever(tmp_path: Path) -> None:
    house = House(tmp_path, timeout_s=0.0)
    house.beats["scheduler"].working()
    house.look(10_000)
    assert house.given_up == []


def test_a_machine_that_slept_is_nobody_s_fault(house: House) -> None:
    house.beats["scheduler"].working()
    house.look(2)
    house.now += 10_000
    house.look(3)
    assert house.given_up == []
