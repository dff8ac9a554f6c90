"""The messages that docs/troubleshooting.md quotes are those of the code."""

from __future__ import annotations

import ast
import functools
import re

import pytest

from tests.vlmserve.server_process import ROOT

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
# Whatever has four words or more is a message; names of settings, commands and files are shorter.
QUOTED = sorted({text for text in re.findall(r"`([^`\n]+)`", PAGE) if len(text.split()) > 3})
# Made of parts that stand in several places.
PARTS = {
    "... is a JSON schema that cannot be followed: ... at #/...": (
        "... is a JSON schema that cannot be followed...: ...",
        " at ...",
    ),
    "... takes longer than ... s (setting --grammar-timeout-s) to compile: it is too large, or explodes": (
        "... s (setting --grammar-timeout-s)",
        "takes longer than ... to compile: it is too large, or explodes",
    ),
    "... cannot be compiled: ...": ("cannot be compiled: ...",),
    "the scheduler process was killed by SIGKILL while starting": (
        "the ... process",
        "... was killed by ...",
        "... while starting",
    ),
    "torch's operators, which are slower: there is no C++ compiler ...": (
        "torch's operators, which are slower: ...",
        "there is no C++ compiler",
    ),
    "torch's operators, which are slower: ... failed: ...": (
        "torch's operators, which are slower: ...",
        "... failed: ...",
    ),
    "attention by torch, which is slow on a GPU": ("attention by ...", "torch, which is slow on a GPU"),
    "the template ... needs what is not there: ...; its fields: ...": (
        "the template ...",
        "needs what is not there: ...; its fields: ...",
    ),
}


@functools.cache
def _texts() -> tuple[str, ...]:
    """All texts of the code, with ... for what is put into them."""
    found = []
    for package in ("vlmserve", "vlmserve_common", "processors", "vision"):
        for file in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    parts = (part.value if isinstance(part, ast.Constant) else "..." for part in node.values)
                    found.append(re.sub(r"(\.\.\.)+", "...", "".join(map(str, parts))))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(re.sub(r"%[\d.]*[sdg]", "...", node.value))
    return tuple(found)


@pytest.mark.parametrize("message", QUOTED)
def test_the_code_says_so(message: str) -> None:
    for part in PARTS.get(message, (message,)):
        assert any(part in text for text in _texts())


def test_there_are_many() -> None:
    assert len(QUOTED) > 35
