"""Packages that only some inputs need."""

from __future__ import annotations

import importlib.util

from vlmserve.config.checks import SettingsError

_OF_THE_EXTRA = ("aiohttp", "fsspec", "pyarrow")


def need(word: str, *packages: str) -> None:
    """Raises SettingsError, with what to install, unless they are there. word: the input that needs them."""
    for package in packages:
        if not _is_installed(package):
            wanted = "'vlmserve[caption]'" if package in _OF_THE_EXTRA else package
            raise SettingsError(f"INPUT {word!r} needs {package}: pip install {wanted}")


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ImportError:
        return False
