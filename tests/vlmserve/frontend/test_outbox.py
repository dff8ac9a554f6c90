"""A queue whose reader takes all at once."""

from __future__ import annotations

import asyncio

import pytest

from vlmserve.frontend.live_requests import Outbox


def test_all_that_waits_is_taken_at_once_and_in_order():
    async def play() -> None:
        outbox: Outbox[int] = Outbox()
        outbox.put(1)
        outbox.put(2)
        assert await outbox.take() == [1, 2]
        taking = asyncio.ensure_future(outbox.take())
        await asyncio.sleep(0)
        outbox.put(3)
        outbox.put(4)
        assert await asyncio.wait_for(taking, 10) == [3, 4]

    asyncio.run(play())


def test_nothing_is_lost_with_a_reader_that_gives_up():
    async def play() -> None:
        outbox: Outbox[int] = Outbox()
        for before in (True, False):
            taking = asyncio.ensure_future(outbox.take())
            await asyncio.sleep(0)
            if before:
                outbox.put(1)
            taking.cancel()
            if not before:
                outbox.put(1)
            with pytest.raises(asyncio.CancelledError):
                await taking
            assert await asyncio.wait_for(outbox.take(), 10) == [1]

    asyncio.run(play())
