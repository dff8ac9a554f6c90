"""Calls made side by side in a few threads; what comes of them is as if they had been made one after the other."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

_Result = TypeVar("_Result")


def side_by_side(
    calls: Sequence[Callable[[], _Result]],
    most: int,
    call_off: Callable[[], None],
    begin: Sequence[int] | None = None,
) -> Generator[tuple[int, _Result], None, None]:
    """(place, result) of each call as it comes; `most` at a time, each in a thread of this generator's own.

    begin: every place, in the order in which the calls are begun; None: as they come. Raises the failure of the first
    call, by place, that fails, when all before it are done. Failed or closed, it drops the calls that have not begun,
    lets `call_off` hurry those under way, and waits for them.
    """
    done: SimpleQueue[tuple[int, Future[_Result]]] = SimpleQueue()
    futures: dict[int, Future[_Result]] = {}
    failed: Future[_Result] | None = None
    failures: list[int] = []  # places, kept by those who fail, so that nobody begins what comes behind
    threads = ThreadPoolExecutor(most, thread_name_prefix="side-by-side")
    try:
        for place in range(len(calls)) if begin is None else begin:
            futures[place] = threads.submit(_run, calls[place], place, failures)
            futures[place].add_done_callback(partial(_put, done, place))
        awaited = set(range(len(calls)))
        while awaited:
            place, future = done.get()
            if place not in awaited:  # behind one that failed
                continue
            awaited.remove(place)
            if future.exception() is None:
                yield place, future.result()
                continue
            failed = future
            for later in range(place + 1, len(calls)):
                futures[later].cancel()
            awaited = {other for other in awaited if other < place}
        if failed is not None:
            failed.result()  # raises
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        call_off()
        threads.shutdown()


def _run(call: Callable[[], _Result], place: int, failures: list[int]) -> _Result:
    if any(place > other for other in failures):
        raise CancelledError
    try:
        return call()
    except BaseException:
        failures.append(place)
        raise


def _put(done: SimpleQueue[tuple[int, Future[_Result]]], place: int, future: Future[_Result]) -> None:
    done.put((place, future))
