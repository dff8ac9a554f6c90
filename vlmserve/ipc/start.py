"""What the processes of a server are told of its start."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StartSettings:
    """Handed to every child process, for those that it starts itself. startup_timeout_s: that the server's start may
    take, and later that of one process. ready_by: when the server's is over, by `time.monotonic`, which is the same in
    all processes.
    """

    log_level: str
    startup_timeout_s: float
    ready_by: float

    @classmethod
    def from_now(cls, *, log_level: str, startup_timeout_s: float) -> StartSettings:
        """Of a server whose start begins now."""
        return cls(
            log_level=log_level,
            startup_timeout_s=startup_timeout_s,
            ready_by=time.monotonic() + startup_timeout_s,
        )
