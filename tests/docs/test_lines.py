"""Lines of the pages fit into an editor beside another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.test_links import PAGES
from tests.vlmserve.server_process import ROOT

MOST = 120


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_are_short(page: Path) -> None:
    """A row of a table cannot be broken."""
    lines = enumerate(page.read_text(encoding="utf-8").splitlines(), start=1)
    assert [number for number, line in lines if len(line) > MOST and not line.startswith("|")] == []


def test_the_readme_takes_five_minutes() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 150
