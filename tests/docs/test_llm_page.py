"""The examples of docs/llm.md run, and print what it says they print."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.vlmserve.server_process import ROOT
from vlmserve.commands.offline.llm import LLM

PAGE = (ROOT / "docs" / "llm.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_examples_run() -> None:
    script = "\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL))
    done = subprocess.run([sys.executable, "-"], input=script, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    promised = re.findall(r"print\(.*\)  # (.+)$", script, re.MULTILINE)
    assert len(promised) > 8
    printed = iter(done.stdout.splitlines())
    for line in promised:
        assert line in printed, f"{line!r} is not in {done.stdout!r}, or not there"


def test_every_public_method_has_its_place() -> None:
    methods = {name for name in vars(LLM) if not name.startswith("_")}
    assert {name for name in methods if f"`{name}(" not in PAGE} == set()
