"""Standard input that a thread can be called away from."""

from __future__ import annotations

import io
import os
from multiprocessing.connection import wait

from vlmserve_common.process.wake_up import WakeUp


class StandardInput(io.RawIOBase):
    """Reads a file descriptor, whose end it is once `stop` was called: whoever waits for more then is let go.

    A thread in an ordinary read cannot be ended, and would keep the process from ending.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._wake_up = WakeUp()

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """See `io.RawIOBase`."""
        if self._wake_up.fd in wait([self._fd, self._wake_up.fd]):
            return 0
        data = os.read(self._fd, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def stop(self) -> None:
        """In any thread."""
        self._wake_up.call()
