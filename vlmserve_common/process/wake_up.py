"""Waking a thread that waits on file descriptors."""

from __future__ import annotations

import contextlib
import os


class WakeUp:
    """`call`, from any thread, makes `fd` readable until whoever waits for it says `take`."""

    def __init__(self) -> None:
        self.fd, self._to = os.pipe()
        for fd in (self.fd, self._to):
            os.set_blocking(fd, False)

    def call(self) -> None:
        """There is something to do."""
        with contextlib.suppress(BlockingIOError):  # full, and so readable as it is
            os.write(self._to, b"!")

    def take(self) -> None:
        """To be called before looking for what there is to do: what comes in between wakes again."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.fd, 4096):
                pass

    def close(self) -> None:
        """Let go of the file descriptors."""
        os.close(self.fd)
        os.close(self._to)
