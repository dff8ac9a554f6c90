"""When the time of a server's start is over."""

from __future__ import annotations

import time

from vlmserve.ipc.start import StartSettings


def test_it_counts_from_now() -> None:
    before = time.monotonic()
    start = StartSettings.from_now(log_level="info", startup_timeout_s=7.5)
    assert before + 7.5 <= start.ready_by <= time.monotonic() + 7.5
