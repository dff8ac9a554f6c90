"""Links between the pages, and from them to files, lead somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vlmserve.server_process import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "assets").rglob("*.md"))]


def _prose(page: Path) -> str:
    """A page without its blocks of code, and without what stands in backquotes in its lines."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`", lambda code: code[0].strip("`").replace("](", "] ("), text)


def _anchors(page: Path) -> set[str]:
    """Names of a page's headings in links, as GitHub makes them."""
    found: dict[str, int] = {}
    anchors = set()
    for title in re.findall(r"^#+ +(.+?) *$", _prose(page), re.MULTILINE):
        anchor = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        times = found.get(anchor, 0)
        found[anchor] = times + 1
        anchors.add(f"{anchor}-{times}" if times else anchor)
    return anchors


def _links(page: Path) -> Iterator[str]:
    for target in re.findall(r"\]\(([^()\s]+)\)", _prose(page)):
        if not re.match(r"[a-z]+:", target):
            yield target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in _links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(link)
    assert not broken


def test_the_models_page_comes_along_in_a_wheel_with_all_that_it_links_to() -> None:
    page = ROOT / "assets" / "default-model" / "README.md"
    assert [link for link in _links(page) if link.startswith("..")] == []


def test_every_page_is_in_the_index() -> None:
    index = ROOT / "docs" / "README.md"
    assert set(_links(index)) >= {page.name for page in (ROOT / "docs").glob("*.md")} - {index.name}
    assert "docs/README.md" in set(_links(ROOT / "README.md"))
