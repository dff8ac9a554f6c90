"""Calls made side by side in a few threads; what comes of them is as if they had been made one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import TypeVar

_Result = TypeVar("_Result")


def side_by_side(
    calls: Sequence[Callable[[], _Result]], most: int, call_off: Callable[[], None], begin: Iterable[int]
) -> list[_Result]:
    """The result of each call; `most` at a time, each in a thread of its own.

    begin: every place in `calls`, in the order in which they are begun. Raises the failure of the first call, by place,
    that fails, when all before it are done. It drops the calls that have not begun then, lets `call_off` hurry those
    under way, and waits for them.
    """
    failures: list[int] = []  # places, kept by those who fail, so that nobody begins what comes behind

    def run(place: int) -> _Result:
        if any(place > other for other in failures):
            raise CancelledError
        try:
            return calls[place]()
        except BaseException:
            failures.append(place)
            raise

    threads = ThreadPoolExecutor(most, thread_name_prefix="side-by-side")
    try:
        futures = {place: threads.submit(run, place) for place in begin}
        return [futures[place].result() for place in range(len(calls))]
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        call_off()
        threads.shutdown()
