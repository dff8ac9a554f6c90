"""Commands that install what is missing into this Python, and those that were installed with it."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

NAME = "vlmserve"
ROOT = Path(__file__).resolve().parents[1]


def install(extra: str | None = None, *, root: Path = ROOT) -> str:
    """Return the command that installs vlmserve, with an extra or without, into this Python.

    root: the folder that this package is in: a checkout, or where installed packages are.
    """
    brackets = f"[{extra}]" if extra else ""
    if checkout_project(root) is None:
        return pip_install(NAME + brackets)
    return pip_install("-c", str(root / "constraints.txt"), "-e", f"{root}{brackets}")


def pip_install(*words: str) -> str:
    """Return a command for a shell. uv makes environments without pip: there it is one of uv."""
    if importlib.util.find_spec("pip") is None:
        words = tuple("--reinstall" if word == "--force-reinstall" else word for word in words)
        return shlex.join(["uv", "pip", "install", "--python", sys.executable, *words])
    return shlex.join([sys.executable, "-m", "pip", "install", *words])


def checkout_project(folder: Path = ROOT) -> dict[str, Any] | None:
    """Return the project of a checkout's pyproject.toml; None for an installed package, even beside such a file."""
    file = folder / "pyproject.toml"
    if not file.is_file():
        return None
    project: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8")).get("project", {})
    return project if project.get("name") == NAME else None


def hf() -> str:
    """Return the hub library's command, which stands beside this Python."""
    found = shutil.which("hf", path=str(Path(sys.executable).parent))
    return shlex.quote(found or "hf")
