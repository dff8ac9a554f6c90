"""Listening sockets, with errors that name the settings."""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
from pathlib import Path

logger = logging.getLogger(__name__)


def listen(host: str, port: int) -> socket.socket:
    """Return a bound socket that does not accept yet. Raises OSError naming --host and --port."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        hint = "; --port 0 lets the system choose one" if error.errno == errno.EADDRINUSE else ""
        raise OSError(f"cannot listen on --host {host} --port {port}: {error.strerror or error}{hint}") from None
    return listener


def address_of(listener: socket.socket) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Return the address that a socket is bound to, without the zone of IPv6."""
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0])


def announce(listener: socket.socket, port_file: str | None, what: str) -> None:
    """Log where the server is, and what it does there. port_file: gets the port; a reader sees all of it or none."""
    host, port = listener.getsockname()[:2]
    if port_file:
        path = Path(port_file)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        unfinished.write_text(f"{port}\n")
        unfinished.replace(path)
    everywhere = address_of(listener).is_unspecified
    if everywhere:  # which is no address to go to
        host = "::1" if ":" in host else "127.0.0.1"
    shown, where = f"[{host}]" if ":" in host else host, " on all addresses" if everywhere else ""
    logger.info("ready: http://%s:%d %s%s (Ctrl-C stops it)", shown, port, what, where)
