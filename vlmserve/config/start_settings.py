"""What a process is told for those that it starts itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class StartSettings:
    """shared_dir: a private directory for large arrays. startup_timeout_s: that a server's start may take, and later
    that of one process. ready_by: when the server's is over, by `time.monotonic`, which is the same in all processes.
    """

    shared_dir: Path
    log_level: str = "info"
    startup_timeout_s: float = 600.0
    ready_by: float = math.inf
