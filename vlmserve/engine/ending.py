"""The end of the engine's process: one thread is told, another one has something to finish."""

from __future__ import annotations

import threading
import time
from typing import NoReturn

from vlmserve_common.process.wake_up import WakeUp


class Ending:
    """patience_s: how long finishing may take, from when it is told."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._wake_up = WakeUp()
        self._deadline: float | None = None
        self._finished = threading.Event()

    @property
    def fd(self) -> int:
        """A file descriptor that becomes readable when the end has come."""
        return self._wake_up.fd

    @property
    def has_come(self) -> bool:
        """Whether the engine's loop is to end."""
        return self._deadline is not None

    @property
    def left_s(self) -> float:
        """Seconds to finish in; for after the end has come."""
        assert self._deadline is not None
        return max(0.0, self._deadline - time.monotonic())

    def tell(self) -> None:
        """The end has come. For any thread."""
        self._deadline = time.monotonic() + self._patience_s
        self._wake_up.call()

    def wait(self, grace_s: float) -> bool:
        """After `tell`: wait for `finish`, so many seconds longer than it may take; whether it came."""
        return self._finished.wait(self.left_s + grace_s)

    def finish(self) -> NoReturn:
        """All is done. The thread that waits ends the process; until then this one stays."""
        self._finished.set()
        while True:
            threading.Event().wait()
