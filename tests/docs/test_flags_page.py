"""docs/flags.md is what the settings make of it."""

from __future__ import annotations

from docs.settings_pages import make_page
from tests.vlmserve.server_process import ROOT


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "flags.md").read_text(encoding="utf-8") == make_page(), "run `make docs`"
