"""Threads of one kind: what becomes of work that is cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextvars import ContextVar

import pytest

from vlmserve_common.process.threads import Threads, UnwantedError, check_wanted


@pytest.fixture
def threads() -> Iterator[Threads]:
    one = Threads("one", 1)
    yield one
    one.close()


def test_work_has_its_caller_s_context(threads: Threads) -> None:
    name = ContextVar("name", default="")
    name.set("me")
    assert asyncio.run(threads.run(name.get)) == "me"
    with pytest.raises(KeyError):
        asyncio.run(threads.run({}.__getitem__, "x"))


def test_cancelled_work_is_told_and_waited_for_or_never_begins(threads: Threads) -> None:
    began, events = threading.Event(), []

    def endless() -> None:
        began.set()
        try:
            while True:
                check_wanted()
        except UnwantedError:
            events.append("told")
            raise

    async def run() -> None:
        first = asyncio.create_task(threads.run(endless))
        second = asyncio.create_task(threads.run(events.append, "begun"))
        await asyncio.to_thread(began.wait)
        for task in (second, first):
            task.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        assert events == ["told"]
        await threads.run(check_wanted)

    asyncio.run(run())


def test_nothing_else_is_unwanted() -> None:
    check_wanted()
