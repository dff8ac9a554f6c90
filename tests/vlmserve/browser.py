"""A real browser for tests of pages; they are skipped where there is none."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright

PATIENCE_MS = 60_000


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """Run Chromium for the time of a block."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no browser on PATH, so nobody looks at the page: apt-get install chromium")
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []  # its sandbox is not for root
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=flags)
        yield browser
        browser.close()
