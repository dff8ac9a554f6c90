"""Helper threads for one clip: items made ahead of their use, and calls made side by side."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import TypeVar

_T = TypeVar("_T")


_Result = TypeVar("_Result")


def ahead(items: Generator[_T, None, None], count: int = 2) -> Generator[_T, None, None]:
    """Yield `items`, which one extra thread makes at most `count` ahead of their use.

    An error of making an item is raised when the item is asked for. When this iterator ends or is closed, `items` is
    closed and the thread has ended.
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix="media-ahead")

    def make() -> tuple[_T] | None:
        for item in items:
            return (item,)
        return None

    try:
        coming = deque(thread.submit(make) for _ in range(count))
        while (made := coming.popleft().result()) is not None:
            yield made[0]
            coming.append(thread.submit(make))
    finally:
        thread.shutdown(cancel_futures=True)
        items.close()


def side_by_side(
    calls: Sequence[Callable[[], _Result]], most: int, call_off: Callable[[], None], begin: Iterable[int]
) -> list[_Result]:
    """Return the result of each call; `most` run at a time, each in a thread of its own.

    `begin`: every place in `calls`, in the order in which they start. If calls fail, the failure of the first one by
    place is raised, once all before it are done. Calls that have not started are dropped. `call_off` hurries the
    running ones, and the function waits for them.
    """
    failures: list[int] = []  # places of failed calls: calls behind them do not start

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
