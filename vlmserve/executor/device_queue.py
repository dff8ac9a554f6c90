"""Does work for the device in the order in which it was submitted, which makes steps in flight safe.

A step may read the results of the step before it. Slots that are given to another request are written by a later step.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from vlmserve_common.errors import EngineError

T = TypeVar("T")
Work = Future
"""Something that was submitted. `result` waits, and returns or raises what the submitted call returned or raised."""


class DeviceQueue:
    """Does everything at once, in the caller's thread.

    depth: how many steps are worth having in flight, if they have at least `least_reqs` requests.
    """

    depth = 1
    least_reqs = 0

    def submit(self, run: Callable[..., T], *args: Any) -> Work[T]:
        """Have `run(*args)` done after everything that was submitted before."""
        return self.here(run, *args)

    def here(self, run: Callable[..., T], *args: Any) -> Work[T]:
        """Do `run(*args)` at once. The caller has waited for everything that was submitted before."""
        done: Work[T] = Future()
        _do(done, run, args)
        return done

    def close(self) -> None:
        """Do everything that was submitted, then stop."""


class StreamQueue(DeviceQueue):
    """The queue of a GPU. It launches at once, in the caller's thread, and the GPU's stream keeps the order. A reader
    of results waits for an event behind them, while the next step is under way.

    choose_device: called first in the thread that submits, because each thread has a current device of its own.
    """

    def __init__(self, choose_device: Callable[[], None] = lambda: None, *, depth: int = 2) -> None:
        self.depth = depth
        self._choose_device = choose_device

    def here(self, run: Callable[..., T], *args: Any) -> Work[T]:
        """Launch it at once."""
        self._choose_device()
        return super().here(run, *args)


class ThreadQueue(DeviceQueue):
    """Does all work in a thread of its own, while the caller prepares the next step. started: called there first.

    Steps of fewer than `least_reqs` requests are not worth handing over: it takes longer than it saves. Unlike that of
    an executor, the thread works until the process ends, for threads that go on behind the main one. A step that hangs
    keeps no process from its end.
    """

    def __init__(self, started: Callable[[], None] = lambda: None, *, depth: int = 2, least_reqs: int = 4) -> None:
        self.depth, self.least_reqs = depth, least_reqs
        self._queue: queue.SimpleQueue[tuple[Work[Any], Callable[..., Any], tuple[Any, ...]] | None]
        self._queue = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(started,), name="device", daemon=True)
        self._thread.start()

    def submit(self, run: Callable[..., T], *args: Any) -> Work[T]:
        """Hand it to the thread."""
        done: Work[T] = Future()
        self._queue.put((done, _in_the_thread, (run, *args)))
        return done

    def close(self) -> None:
        """Let the thread finish, and end it."""
        self._queue.put(None)
        self._thread.join()

    def _run(self, started: Callable[[], None]) -> None:
        started()
        while (work := self._queue.get()) is not None:
            _do(*work)
            del work  # lets go of the arguments


def _do(done: Work[T], run: Callable[..., T], args: tuple[Any, ...]) -> None:
    try:
        done.set_result(run(*args))
    except Exception as error:
        done.set_exception(error)


def _in_the_thread(run: Callable[..., T], *args: Any) -> T:
    try:
        return run(*args)
    except Exception:
        raise
    except BaseException as error:  # which would seem to be meant for the thread that waits
        raise EngineError(f"{type(error).__name__} in the device's thread") from error
