"""The end of the engine's process: one thread announces it, and another one has something to finish."""

from __future__ import annotations

import threading
import time
from typing import NoReturn

from vlmserve_common.process.wake_up import WakeUp


class Ending:
    """The announced end. patience_s: seconds for finishing, from the announcement on."""

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
        """Seconds left for finishing, once the end has been announced."""
        assert self._deadline is not None
        return max(0.0, self._deadline - time.monotonic())

    def tell(self) -> None:
        """Announce the end. Any thread may call this."""
        self._deadline = time.monotonic() + self._patience_s
        self._wake_up.call()

    def wait(self, grace_s: float) -> bool:
        """Wait for `finish` after `tell`, for `grace_s` longer than finishing may take. Return whether it came."""
        return self._finished.wait(self.left_s + grace_s)

    def finish(self) -> NoReturn:
        """Say that all is finished. The waiting thread ends the process; this one never returns."""
        self._finished.set()
        while True:
            threading.Event().wait()
