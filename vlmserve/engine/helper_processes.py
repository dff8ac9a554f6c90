"""What media and encoder processes are started with."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from vlmserve.config.settings import ServerSettings


@dataclass(frozen=True, kw_only=True)
class HelperProcesses:
    """shared_dir: a private directory for large arrays. startup_timeout_s: for each process's start. ready_by: when
    the start of whoever starts them is over, by `time.monotonic`.
    """

    shared_dir: Path
    log_level: str = "info"
    startup_timeout_s: float = 600.0
    ready_by: float = math.inf


def helper_processes(settings: ServerSettings, shared_dir: Path | None) -> HelperProcesses | None:
    """What a server's settings say; None without a directory for arrays."""
    if shared_dir is None:
        return None
    return HelperProcesses(
        shared_dir=shared_dir, log_level=settings.log_level, startup_timeout_s=settings.startup_timeout_s
    )
