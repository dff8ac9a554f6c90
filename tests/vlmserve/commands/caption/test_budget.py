"""Bytes in memory: never more than there may be, first come, first served, nothing lost by whoever gives up."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from vlmserve.commands.caption.run import ByteBudget


@given(
    total=st.integers(1, 20),
    holders=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 4), st.booleans()), max_size=20),
)
def test_simulation(total, holders):
    budget, held, order = ByteBudget(total), 0, []

    async def hold(number: int, size: int, turns: int) -> None:
        nonlocal held
        async with budget.hold(size):
            order.append(number)
            held += min(size, total)
            assert held <= total
            try:
                for _ in range(turns):
                    await asyncio.sleep(0)
            finally:
                held -= min(size, total)

    async def run() -> None:
        tasks = [asyncio.create_task(hold(n, size, turns)) for n, (size, turns, _) in enumerate(holders)]
        await asyncio.sleep(0)
        for task, (_, _, gives_up) in zip(tasks, holders, strict=True):
            if gives_up:
                task.cancel()
                await asyncio.sleep(0)
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        async with asyncio.timeout(10):
            async with budget.hold(total):  # everything was given back
                pass

    asyncio.run(run())
    assert order == sorted(order)
    assert set(order) >= {number for number, (_, _, gives_up) in enumerate(holders) if not gives_up}
