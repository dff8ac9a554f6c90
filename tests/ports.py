"""Ports for tests whose processes have to agree on one before any of them listens."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens at.

    It lies below those that the system hands out: one of these may go to another program before the test listens, or to
    the very connection that asks again and again whether somebody listens there.
    """
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    raise AssertionError("no port is free")
