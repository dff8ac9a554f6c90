"""Commands that messages name: they work where they are read."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from vlmserve_common.installing import ROOT, hf, install


def test_a_checkout_installs_its_own_extras() -> None:
    words = shlex.split(install("verify"))
    assert words == [sys.executable, "-m", "pip", "install", "-c", f"{ROOT}/constraints.txt", "-e", f"{ROOT}[verify]"]
    assert (ROOT / "constraints.txt").is_file()


def test_an_installed_package_names_itself(tmp_path: Path) -> None:
    assert shlex.split(install("verify", root=tmp_path))[-2:] == ["install", "vlmserve[verify]"]


def test_the_hubs_command_is_the_one_beside_this_python() -> None:
    assert Path(hf()).parent == Path(sys.executable).parent
    assert Path(hf()).is_file()
