"""Making the next thing while the last one is used."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")


def ahead(items: Generator[T, None, None], count: int = 2) -> Generator[T, None, None]:
    """`items`, made in a thread of its own, at the most `count` of them before they are asked for.

    What making one raises is raised where it is asked for. When this iterator ends or is closed, `items` has been
    closed and the thread is gone.
    """
    made: queue.SimpleQueue[tuple[T] | BaseException | None] = queue.SimpleQueue()
    room = threading.Semaphore(count)
    stop = threading.Event()

    def work() -> None:
        end: BaseException | None = None
        try:
            while room.acquire() and not stop.is_set():
                made.put((next(items),))
        except StopIteration:
            pass
        except BaseException as error:
            end = error
        finally:
            items.close()
            made.put(end)

    thread = threading.Thread(target=work, name="media-ahead", daemon=True)
    thread.start()
    try:
        while isinstance(item := made.get(), tuple):
            yield item[0]
            room.release()
        if item is not None:
            raise item
    finally:
        stop.set()
        room.release()
        thread.join()
