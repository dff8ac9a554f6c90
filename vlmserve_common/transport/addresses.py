"""Addresses of links between servers: tcp://HOST:PORT, with brackets around an IPv6 host."""

from __future__ import annotations

import ipaddress
import re
import socket


def tcp_url(host: str, port: int | str) -> str:
    """Return the address of a port at a host, which has no brackets yet."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def split_tcp_url(url: str) -> tuple[str, int]:
    """Return host, without brackets, and port of tcp://HOST:PORT."""
    found = re.fullmatch(r"tcp://(?:\[([^\]]+)\]|([^:/\s]+)):(\d+)", url)
    assert found is not None, url
    return found[1] or found[2], int(found[3])


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches the host, an address or a name. OSError if there is no such name."""
    found = {str(one[4][0]).partition("%")[0] for one in socket.getaddrinfo(host, None)}
    return all(ipaddress.ip_address(one).is_loopback for one in found)
