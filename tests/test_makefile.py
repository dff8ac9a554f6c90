"""`make` on a fresh clone: it says what it does before it takes minutes for it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Makes an environment with itself as its interpreter, and tells when pip would have worked.
_PYTHON = """#!/bin/sh
case "$*" in
  "-m venv "*) mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
  *pip*install*) echo "(pip)" ;;
esac
"""


def test_each_step_is_told_before_it_begins(tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text(_PYTHON)
    python.chmod(0o755)
    words = ["make", "-C", str(ROOT), "--no-print-directory", "setup-test"]
    words += [f"VENV={tmp_path / 'venv'}", f"PYTHON={python}", "TORCH_INDEX="]
    without = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(words, env=without, capture_output=True, text=True, check=True)
    made, torch, pip, ours, pip_again, installed, tests, *rest = done.stdout.splitlines()
    assert made.startswith(f"Making {tmp_path / 'venv'} with")
    assert torch.startswith("1 of 2: PyTorch into")
    assert ours.startswith("2 of 2: vlmserve and its libraries")
    assert tests.startswith("Linters, and what the tests use")
    for line in (torch, ours, tests):
        assert "GB to download" in line
    assert [pip, pip_again, installed, *rest] == ["(pip)", "(pip)", "Installed.", "(pip)", "(pip)"]


def test_the_index_of_torch_stands_beside_the_usual_one(tmp_path: Path) -> None:
    """Alone, it would have to have the other pinned packages, too, that torch needs."""
    words = ["make", "-C", str(ROOT), "-n", "setup", f"VENV={tmp_path / 'venv'}", "TORCH_INDEX=https://torch.example"]
    without = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    told = subprocess.run(words, env=without, capture_output=True, text=True, check=True).stdout
    assert " --extra-index-url https://torch.example torch\n" in told
    assert " --index-url" not in told
