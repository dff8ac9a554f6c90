"""vlmserve on a Ray cluster: `from vlmserve.ray import Captioner, VLMProcessor, build_app`.

Every name here is imported when it is first asked for, so that one of them needs no library of another.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlmserve.commands.caption.rows import Captioner as Captioner
    from vlmserve.commands.caption.rows import VLMProcessor as VLMProcessor
    from vlmserve.ray.service.app import build_app as build_app

_PLACES = {
    "Captioner": "vlmserve.commands.caption.rows",
    "VLMProcessor": "vlmserve.commands.caption.rows",
    "build_app": "vlmserve.ray.service.app",
}

__all__ = [*_PLACES]


def __getattr__(name: str) -> Any:
    """Import what a name stands for."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_PLACES[name]), name)
    return value
