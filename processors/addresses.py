"""Which network addresses a server may be sent to by a stranger's URL, and looking them up exactly once."""

from __future__ import annotations

import ipaddress
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from typing import TypeAlias

IPAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolver: TypeAlias = Callable[[str, int], Sequence[str]]
"""(host, port) -> the host's addresses as text, in the order to try; raises OSError when there are none."""

_GLOBAL_UNICAST_V6 = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_6TO4_RELAYS = ipaddress.IPv4Network("192.88.99.0/24")
_CLOUD_METADATA = frozenset({ipaddress.IPv4Address("168.63.129.16")})  # Azure's, though it looks public
_ISATAP_MARK = 0x5EFE


def is_public_address(address: IPAddress) -> bool:
    """Whether anybody on the internet may be reached under `address`.

    False for loopback, private, link-local (cloud metadata among them), shared (CGNAT), multicast, reserved and
    unspecified addresses, and for IPv6 addresses that carry such an IPv4 address (mapped, NAT64, 6to4, Teredo, ISATAP).
    """
    if isinstance(address, ipaddress.IPv4Address):
        return (
            address.is_global
            and not address.is_multicast
            and not address.is_reserved
            and address not in _6TO4_RELAYS
            and address not in _CLOUD_METADATA
        )
    if address.ipv4_mapped is not None:
        return is_public_address(address.ipv4_mapped)
    if address in _NAT64:
        return is_public_address(_low_ipv4(address))
    if address not in _GLOBAL_UNICAST_V6 or not address.is_global:
        # Python counts Teredo (2001::/32) as private; nothing serves media there.
        return False
    if address.sixtofour is not None and not is_public_address(address.sixtofour):
        return False
    is_isatap = (int(address) >> 32) & 0xFFFF == _ISATAP_MARK
    return not is_isatap or is_public_address(_low_ipv4(address))


def _low_ipv4(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address:
    return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)


def system_resolver(host: str, port: int) -> list[str]:
    """Addresses of `host` by the system's resolver, without repeats. Blocks as long as the system likes."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def resolve(resolver: Resolver, host: str, port: int, timeout_s: float) -> list[IPAddress]:
    """Ask `resolver` once, for `timeout_s` seconds at the most.

    Raises TimeoutError, or the resolver's OSError (also for a host that is no host name at all).
    """
    answers: queue.SimpleQueue[list[IPAddress] | Exception] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put([ipaddress.ip_address(text) for text in resolver(host, port)])
        except Exception as error:
            answers.put(error)

    # getaddrinfo cannot be interrupted: a thread that hangs in it is left behind until the system gives up.
    threading.Thread(target=ask, name="resolve", daemon=True).start()
    try:
        answer = answers.get(timeout=max(timeout_s, 0.0))
    except queue.Empty:
        raise TimeoutError(f"no answer for {host!r}") from None
    if isinstance(answer, OSError):
        raise answer
    if isinstance(answer, Exception):
        raise OSError(f"{host!r} cannot be looked up: {answer}") from answer
    if not answer:
        raise OSError(f"{host!r} has no address")
    return answer
