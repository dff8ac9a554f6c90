"""Who is next where media are decoded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from processors.pool.turns import Turns


class Work(NamedTuple):
    cost: float = 1.0
    client: str = ""
    clip: bool = False


class Scene:
    """Work that is begun in some order, and ends when it is told to."""

    def __init__(self, places: int, **options: Any) -> None:
        self.turns = Turns(places, **options)
        self.begun: list[Work] = []
        self.at_it: dict[asyncio.Task[None], Work] = {}
        self.waiting: dict[asyncio.Task[None], Work] = {}

    async def come(self, *works: Work) -> None:
        for work in works:
            self.waiting[asyncio.create_task(self._do(work))] = work
        await self._settle()

    async def end(self, task: asyncio.Task[None]) -> None:
        """Cancel it, wherever it is."""
        task.cancel()
        await self._settle()

    async def end_all(self) -> list[Work]:
        """One after the other; all that was begun, in order."""
        while self.at_it:
            await self.end(next(iter(self.at_it)))
        return self.begun

    async def _do(self, work: Work) -> None:
        me = asyncio.current_task()
        try:
            async with self.turns.turn(cost=work.cost, client=work.client, clip=work.clip):
                self.begun.append(work)
                self.at_it[me] = self.waiting.pop(me)
                with suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
        finally:
            for group in (self.at_it, self.waiting):
                group.pop(me, None)

    @staticmethod
    async def _settle() -> None:
        for _ in range(5):
            await asyncio.sleep(0)


def order_of(works: Sequence[Work], *, places: int = 1) -> list[Work]:
    """How work is begun that comes at once, while another one has the place."""

    async def play() -> list[Work]:
        scene = Scene(places)
        await scene.come(*[Work()] * places)
        await scene.come(*works)
        return (await scene.end_all())[places:]

    return asyncio.run(play())


def test_short_work_is_before_long():
    long, short, shorter = Work(cost=9), Work(cost=3), Work(cost=2)
    assert order_of([long, short, shorter]) == [shorter, short, long]


def test_long_work_is_not_put_off_for_ever():
    async def play() -> int:
        scene = Scene(1)
        await scene.come(Work(), Work(cost=10), Work())
        while Work(cost=10) not in scene.begun:
            await scene.end(next(iter(scene.at_it)))
            await scene.come(Work())
        count = len(scene.begun)
        await scene.end_all()
        return count

    assert asyncio.run(play()) <= 12


def test_clients_take_turns_whatever_they_bring():
    many, one = [Work(cost=10, client="a")] * 20, Work(cost=11, client="b")
    assert one in order_of([*many, one])[:2]
    assert order_of([*many, *[one] * 2]).index(one) <= 1


@pytest.mark.parametrize("let_in", [True, False])
def test_one_cancelled_in_the_moment_in_which_its_turn_comes_gives_way(let_in):
    async def play() -> None:
        scene = Scene(1)
        await scene.come(Work(), Work(cost=2), Work(cost=3))
        first, second = scene.waiting
        [holder] = scene.at_it
        holder.cancel()
        if let_in:
            await asyncio.sleep(0)
        first.cancel()
        await scene._settle()
        assert second in scene.at_it
        assert holder.exception() is None
        await scene.end_all()

    asyncio.run(play())


WORKS = st.builds(Work, st.integers(1, 50), st.sampled_from("abc"), st.booleans())


@given(st.integers(1, 4), st.lists(st.one_of(WORKS, st.integers(0, 20)), max_size=40))
def test_places_are_used_and_never_more_than_there_are(places, steps):
    async def play() -> None:
        scene, count = Scene(places), 0
        for step in steps:
            if isinstance(step, Work):
                count += 1
                await scene.come(step)
            elif there := [*scene.at_it, *scene.waiting]:
                await scene.end(there[step % len(there)])
            clips = sum(work.clip for work in scene.at_it.values())
            assert len(scene.at_it) <= places
            assert clips <= max(1, places - 1)
            fits = [work for work in scene.waiting.values() if not work.clip or clips < max(1, places - 1)]
            assert not fits or len(scene.at_it) == places, "a place is free"
        await scene.end_all()
        assert not scene.waiting

    asyncio.run(play())


def test_small_files_that_take_long_count_by_their_time() -> None:
    now = 0.0

    async def play() -> list[Work]:
        nonlocal now
        scene = Scene(1, cost_per_s=1.0, clock=lambda: now)
        await scene.come(Work(client="costly"))
        await scene.come(Work(client="costly"), *[Work(cost=5.0, client="other")] * 3)
        now = 100.0
        return (await scene.end_all())[1:]

    assert [work.client for work in asyncio.run(play())] == ["other", "other", "other", "costly"]
