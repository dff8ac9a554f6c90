"""What is not to be tried again."""

from __future__ import annotations

import threading
from collections import OrderedDict

from processors.pool.maker import FatalMediumError


class FatalMedia:
    """The latest media, by key, that took a process along, each with its error. Thread-safe."""

    def __init__(self, max_entries: int = 1024) -> None:
        self._max_entries = max_entries
        self._lock = threading.Lock()
        self._errors: OrderedDict[bytes, FatalMediumError] = OrderedDict()

    def check(self, key: bytes) -> None:
        """Raises a medium's error, if it is one of them."""
        with self._lock:
            error = self._errors.get(key)
        if error is not None:
            what = f"{error.message}; it is not tried again"
            raise FatalMediumError(what, code=error.code, status=error.status)

    def add(self, key: bytes, error: FatalMediumError) -> None:
        """Do not try this one again."""
        # Not the error itself: its traceback holds the medium's bytes.
        plain = FatalMediumError(error.message, code=error.code, status=error.status)
        with self._lock:
            self._errors[key] = plain
            while len(self._errors) > self._max_entries:
                self._errors.popitem(last=False)
