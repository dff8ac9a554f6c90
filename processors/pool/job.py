"""One medium on its way through the pool."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, InvalidStateError
from contextlib import suppress
from typing import Any

from processors.fetch.fetching import MediaFetcher
from processors.processed import ProcessedMedium
from vlmserve_common.errors import BadRequestError


class Job:
    """What a request waits for. Thread-safe.

    At any moment it waits somewhere, from where it can be taken away, or it is in the hands of a thread. Whoever takes
    it away has it, too, and whoever has it lets it leave, once, before its request is answered. Called off, it leaves
    at once where it waits; a thread looks at `called_off` before each further step.

    answer: what becomes of it; cancelled where it was called off. fetcher: the job's own. on_leave: told once.
    """

    def __init__(self, param: str | None, fetcher: MediaFetcher, on_leave: Callable[[Job], None]) -> None:
        self.answer: Future[ProcessedMedium] = Future()
        self.fetcher = fetcher
        self._param = param
        self._on_leave = on_leave
        self._lock = threading.Lock()
        self._left = False
        self._take_away: Callable[[], bool] = _waits_nowhere

    @property
    def called_off(self) -> bool:
        """Whether nobody wants it any more."""
        return self.answer.cancelled()

    def submit(self, threads: Executor, step: Callable[..., None], *args: Any) -> Future[None]:
        """Let it wait for a thread to do `step`. Whoever has it calls this. RuntimeError after a shutdown."""
        with self._lock:  # or the step might say first where it waits next
            queued = threads.submit(step, *args)
            self._take_away = queued.cancel
        self._look_again()
        return queued

    def wait_for(self, take_away: Callable[[], bool]) -> None:
        """Let it wait elsewhere. take_away: ends that, True if it still waited: whoever is told so has the job."""
        with self._lock:
            if not self._left:
                self._take_away = take_away
        self._look_again()

    def call_off(self) -> None:
        """Its request is not interested any more, or has its answer. Breaks off what it fetches."""
        self.answer.cancel()
        self.fetcher.close()
        if self._take_away():
            self._leave()

    def refuse(self, error: BaseException) -> None:
        """Fail it, if it waits."""
        if self._take_away():
            self.fail(error)

    def give(self, made: ProcessedMedium) -> None:
        """This became of it."""
        self._leave()
        with suppress(InvalidStateError):  # called off
            self.answer.set_result(made)

    def fail(self, error: BaseException) -> None:
        """This came in between. A BadRequestError is told the request field."""
        if isinstance(error, BadRequestError):
            error.param = error.param or self._param
        self._leave()
        with suppress(InvalidStateError):
            self.answer.set_exception(error)

    def _look_again(self) -> None:
        """Who called it off before this may have found it nowhere."""
        if self.called_off:
            self.call_off()

    def _leave(self) -> None:
        with self._lock:
            if self._left:
                return
            self._left = True
            self._take_away = _waits_nowhere
        self._on_leave(self)


def _waits_nowhere() -> bool:
    return False
