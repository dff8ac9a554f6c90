"""The version that all nodes of an app must have."""

from __future__ import annotations

import socket

from vlmserve_common.errors import SettingsError
from vlmserve_common.version import __version__


def check_version(built_with: str, here: str = __version__) -> None:
    """Raise SettingsError if this node has another version than the one that built the app."""
    if here != built_with:
        raise SettingsError(
            f"node {socket.gethostname()} has vlmserve {here}, and the app was built with {built_with}: install the "
            "same version on all nodes"
        )
