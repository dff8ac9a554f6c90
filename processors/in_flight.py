"""Work that several ask for at the same time, done once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Generic, TypeVar

_Made = TypeVar("_Made")


class InFlight(Generic[_Made]):
    """Thread-safe. Keeps nothing: whoever comes when the work is done has it done again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[Hashable, Future[_Made]] = {}

    def share(self, key: Hashable, make: Callable[[], _Made]) -> _Made:
        """What `make` gives, or what another thread is making under this key, waiting for it.

        Raises what `make` raises; those who waited for it in vain make it themselves, so that nobody gets an error that
        tells of another's request.
        """
        while True:
            with self._lock:
                theirs = self._under_way.get(key)
                if theirs is None:
                    ours = self._under_way[key] = Future()
                    break
            if theirs.exception() is None:
                return theirs.result()
        try:
            made = make()
        except BaseException as error:
            self._remove(key)
            ours.set_exception(error)
            raise
        self._remove(key)
        ours.set_result(made)
        return made

    def _remove(self, key: Hashable) -> None:
        with self._lock:
            del self._under_way[key]
