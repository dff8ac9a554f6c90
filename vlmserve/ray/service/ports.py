"""Ports for what is told its port before it listens."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Return a port that nobody listens at, at least now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
