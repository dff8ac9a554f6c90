"""Waking a thread that waits on file descriptors."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from typing import Generic, TypeVar

_T = TypeVar("_T")


class WakeUp:
    """A file descriptor `fd` that `call`, from any thread, makes readable until `take`."""

    def __init__(self) -> None:
        self.fd, self._to = os.pipe()
        for fd in (self.fd, self._to):
            os.set_blocking(fd, False)

    def call(self) -> None:
        """Wake the thread that waits for `fd`."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full, and so readable
            os.write(self._to, b"!")

    def take(self) -> None:
        """Reset `fd`. Call it before looking for work, so that work that arrives in between wakes the thread again."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.fd, 4096):
                pass

    def close(self) -> None:
        """Close the file descriptors."""
        os.close(self.fd)
        os.close(self._to)


class Mailbox(Generic[_T]):
    """Messages from any thread to one that waits for `fd`."""

    def __init__(self) -> None:
        self._wake_up = WakeUp()
        self._messages: deque[_T] = deque()

    @property
    def fd(self) -> int:
        """Readable when a message has come."""
        return self._wake_up.fd

    def put(self, message: _T) -> None:
        """Deliver a message."""
        self._messages.append(message)
        self._wake_up.call()

    def take(self) -> list[_T]:
        """Return all messages that have come."""
        if not self._messages:
            return []
        self._wake_up.take()
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def close(self) -> None:
        """Close the file descriptors. No thread may put a message any more."""
        self._wake_up.close()
