"""Making the next thing while the last one is used."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


def ahead(items: Generator[T, None, None], count: int = 2) -> Generator[T, None, None]:
    """`items`, made in a thread of its own, at the most `count` of them before they are asked for.

    What making one raises is raised where it is asked for. When this iterator ends or is closed, `items` has been
    closed and the thread is gone.
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix="media-ahead")

    def make() -> tuple[T] | None:
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
