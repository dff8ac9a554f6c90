"""The turns of the API's event loop: measured, and few connections in each."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import pytest

from vlmserve.api.event_loop import ApiEventLoop, TurnSelector, longest_turn_s


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def turn(selector: TurnSelector, clock: Clock, seconds: float) -> None:
    selector.select(0)
    clock.now += seconds


def test_the_longest_turn_of_late() -> None:
    clock = Clock()
    with contextlib.closing(TurnSelector(clock)) as selector:
        for seconds in (0.1, 0.3, 0.2, 0.0):
            turn(selector, clock, seconds)
        assert selector.longest_s == pytest.approx(0.3)
        for _ in range(610):
            turn(selector, clock, 0.1)
        assert selector.longest_s == pytest.approx(0.1)


def test_a_loop_that_wakes_late_has_a_long_turn() -> None:
    """A thread held the interpreter, or another program the processor."""
    ticks = iter([0.0, 0.0, 1.5, 1.6, 1.6])  # made, asked to wake at 0.1, woken, asked again
    with contextlib.closing(TurnSelector(lambda: next(ticks))) as selector:
        selector.select(0.1)
        selector.select(0)
        assert selector.longest_s == pytest.approx(1.5)


@pytest.fixture
def links() -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        pairs = [socket.socketpair() for _ in range(80)]
        for one, other in pairs:
            stack.enter_context(one)
            stack.enter_context(other).send(b"x")
        yield [one for one, _ in pairs]


def test_a_turn_has_few_connections_and_all_get_theirs(links: list[socket.socket]) -> None:
    with contextlib.closing(TurnSelector()) as selector:
        for link in links:
            selector.register(link, 1)
        turns = [[key.fileobj for key, _ in selector.select(0)] for _ in range(3)]
        assert [len(some) for some in turns] == [32, 32, 16]
        assert {id(link) for some in turns for link in some} == {id(link) for link in links}


def test_connections_that_ended_or_changed_meanwhile_are_left_out(links: list[socket.socket]) -> None:
    """The number of a closed one may be another's by then."""
    with contextlib.closing(TurnSelector()) as selector:
        for link in links:
            selector.register(link, 1)
        first = [key.fileobj for key, _ in selector.select(0)]
        later = [link for link in links if link not in first]
        selector.unregister(later[0])
        selector.register(later[0], 1, "another")
        selector.modify(later[1], 3)
        for link in later[2:]:
            selector.unregister(link)
        assert selector.select(0) == []
        again = [key.fileobj for key, _ in selector.select(0)]
        assert {*map(id, again)} <= {*map(id, [*first, *later[:2]])}
        assert len(again) == 32


def test_the_running_loop_tells() -> None:
    async def told() -> tuple[float, bool]:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return longest_turn_s(), isinstance(asyncio.get_running_loop(), ApiEventLoop)

    with asyncio.Runner(loop_factory=ApiEventLoop) as runner:
        seconds, ours = runner.run(told())
    assert ours
    assert seconds > 0
    assert asyncio.run(told()) == (0, False)
