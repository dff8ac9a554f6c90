"""Does work for the device in the order in which it was submitted, which makes steps in flight safe.

A step may read the results of the step before it. Slots that are given to another request are written by a later step.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from vlmserve_common.errors import EngineError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Work(Protocol[T_co]):
    """Something that was submitted."""

    def result(self) -> T_co:
        """Wait, and return or raise what the submitted call returned or raised."""
        ...


class DeviceQueue(Protocol):
    """depth: how many steps are worth having in flight, if they have at least `least_reqs` requests."""

    depth: int
    least_reqs: int

    def submit(self, run: Callable[..., T], *args: Any) -> Work[T]:
        """Have `run(*args)` done after everything that was submitted before."""
        ...

    def here(self, run: Callable[..., T], *args: Any) -> Work[T]:
        """Do `run(*args)` at once. The caller has waited for everything that was submitted before."""
        ...

    def close(self) -> None:
        """Do everything that was submitted, then stop."""
        ...


class _Done(Generic[T]):
    def __init__(self, run: Callable[..., T], args: tuple[Any, ...]) -> None:
        self._error: Exception | None = None
        try:
            self._value = run(*args)
        except Exception as error:
            self._error = error

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._value


class InlineQueue:
    """Does everything at once, in the caller's thread."""

    depth = 1
    least_reqs = 0

    def here(self, run: Callable[..., T], *args: Any) -> Work[T]:
        """Do it at once."""
        return _Done(run, args)

    def submit(self, run: Callable[..., T], *args: Any) -> Work[T]:
        """Do it at once."""
        return _Done(run, args)

    def close(self) -> None:
        """Do nothing: everything is done."""


class StreamQueue(InlineQueue):
    """The queue of a GPU. It launches at once, in the caller's thread, and the GPU's stream keeps the order. A reader
    of results waits for an event behind them, while the next step is under way.

    choose_device: called first in the thread that submits, because each thread has a current device of its own.
    """

    def __init__(self, choose_device: Callable[[], None] | None = None, *, depth: int = 2) -> None:
        self.depth = depth
        self._choose_device = choose_device

    def here(self, run: Callable[..., T], *args: Any) -> Work[T]:
        """Launch it at once."""
        return self.submit(run, *args)

    def submit(self, run: Callable[..., T], *args: Any) -> Work[T]:
        """Launch it at once."""
        if self._choose_device is not None:
            self._choose_device()
        return super().submit(run, *args)


class _Later(Generic[T]):
    def __init__(self, run: Callable[..., T], args: tuple[Any, ...]) -> None:
        self._call: tuple[Callable[..., T], tuple[Any, ...]] | None = (run, args)
        self._done = threading.Lock()
        self._done.acquire()
        self._error: Exception | None = None

    def run(self) -> None:
        assert self._call is not None
        (run, args), self._call = self._call, None  # lets go of the arguments
        try:
            self._value = run(*args)
        except Exception as error:
            self._error = error
        except BaseException as error:  # which would seem to be meant for the thread that waits
            self._error = EngineError(f"{type(error).__name__} in the device's thread")
        self._done.release()

    def result(self) -> T:
        with self._done:
            if self._error is not None:
                raise self._error
            return self._value


class ThreadQueue:
    """Does everything in a thread of its own, while the caller prepares the next step. started: called there first.

    Steps of fewer than `least_reqs` requests are not worth handing over: it takes longer than it saves.
    """

    def __init__(self, started: Callable[[], None] | None = None, *, depth: int = 2, least_reqs: int = 4) -> None:
        self.depth, self.least_reqs = depth, least_reqs
        self._queue: queue.SimpleQueue[_Later[Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(started,), name="device", daemon=True)
        self._thread.start()

    def here(self, run: Callable[..., T], *args: Any) -> Work[T]:
        """Do it at once, in the caller's thread."""
        return _Done(run, args)

    def submit(self, run: Callable[..., T], *args: Any) -> Work[T]:
        """Hand it to the thread."""
        work = _Later(run, args)
        self._queue.put(work)
        return work

    def close(self) -> None:
        """Let the thread finish, and end it."""
        self._queue.put(None)
        self._thread.join()

    def _run(self, started: Callable[[], None] | None) -> None:
        if started is not None:
            started()
        while (work := self._queue.get()) is not None:
            work.run()
            del work  # and its result
