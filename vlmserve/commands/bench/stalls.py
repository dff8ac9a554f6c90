"""How long an event loop stands still, and whose fault that is."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

_NAP_S = 0.001


async def longest_stall(work: Awaitable[object]) -> float:
    """Seconds by the clock that this loop came too late at the most while it awaited `work`."""
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        while True:
            started = time.perf_counter()
            await asyncio.sleep(_NAP_S)
            longest = max(longest, time.perf_counter() - started - _NAP_S)

    watching = asyncio.create_task(watch())
    await work
    watching.cancel()
    return longest


def longest_hold(work: Callable[[], object], tries: int) -> float:
    """Seconds of CPU time that a thread with `work` takes at the most between two steps of this one.

    That is how long it keeps Python's lock; how busy the machine is does not show. The least of some tries.
    """
    return min(_hold(work) for _ in range(tries))


def _hold(work: Callable[[], object]) -> float:
    with ThreadPoolExecutor(1) as thread:  # which stays when the work is done, and its clock with it
        clock = thread.submit(lambda: time.pthread_getcpuclockid(threading.get_ident())).result()
        longest, before = 0.0, time.clock_gettime(clock)
        under_way = thread.submit(work)
        while not under_way.done():
            now = time.clock_gettime(clock)
            longest, before = max(longest, now - before), now
        return max(longest, time.clock_gettime(clock) - before)
