"""Settings of the start of a process."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class StartSettings:
    """Settings of the start of a process.

    shared_dir: a private directory for large arrays. startup_timeout_s: the most seconds for a server's start, and
    later for one process. ready_by: the end of the server's start, by `time.monotonic`, which is the same in all
    processes.
    """

    shared_dir: Path
    log_level: str = "info"
    startup_timeout_s: float = 600.0
    ready_by: float = math.inf
