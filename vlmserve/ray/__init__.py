"""vlmserve on a Ray cluster. Every name here is imported when it is first asked for, and needs `vlmserve[cluster]`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlmserve.ray.service.app import build_app as build_app

__all__ = ["build_app"]


def __getattr__(name: str) -> Any:
    """Import what a name stands for."""
    if name != "build_app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vlmserve.ray.service.app import build_app

    return build_app
