"""Listening sockets, with errors that name the settings."""

from __future__ import annotations

import errno
import ipaddress
import socket


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
