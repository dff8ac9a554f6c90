"""Decides which network addresses a stranger's URL may reach, and looks each host up exactly once."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeAlias

IPAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolver: TypeAlias = Callable[[str, int], Sequence[str]]
"""(host, port) -> the host's addresses as text, in the order to try; raises OSError when there are none."""

# What IANA's special-purpose registries keep off the public internet. Not `ipaddress.is_global`: that one differs
# between Python versions (192.0.0.0/24, where a cloud has its metadata service, is global to some).
# 168.63.129.16 is Azure's metadata and name service, though it looks public.
_NOT_PUBLIC = """
0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 168.63.129.16/32 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.2.0/24
192.88.99.0/24 192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 224.0.0.0/4 240.0.0.0/4
"""
_SPECIAL_V4 = tuple(map(ipaddress.IPv4Network, _NOT_PUBLIC.split()))
_GLOBAL_UNICAST_V6 = ipaddress.IPv6Network("2000::/3")
_SPECIAL_V6 = tuple(ipaddress.IPv6Network(text) for text in ("2001::/23", "2001:db8::/32", "3fff::/20"))
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
_ISATAP_MARK = 0x5EFE


def is_public_address(address: IPAddress) -> bool:
    """Return True if `address` belongs to the public internet.

    It is False for loopback, private, link-local (which includes cloud metadata), shared (CGNAT), multicast, reserved
    and unspecified addresses. It is also False for IPv6 addresses that carry such an IPv4 address (mapped, NAT64, 6to4,
    ISATAP), and for all Teredo addresses.
    """
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _SPECIAL_V4)
    if address.ipv4_mapped is not None:
        return is_public_address(address.ipv4_mapped)
    if address in _NAT64:
        return is_public_address(_low_ipv4(address))
    if address not in _GLOBAL_UNICAST_V6 or any(address in network for network in _SPECIAL_V6):
        return False
    if address.sixtofour is not None and not is_public_address(address.sixtofour):
        return False
    is_isatap = (int(address) >> 32) & 0xFFFF == _ISATAP_MARK
    return not is_isatap or is_public_address(_low_ipv4(address))


def _low_ipv4(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address:
    return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)


def system_resolver(host: str, port: int) -> list[str]:
    """Return the addresses of `host` from the system's resolver, without repeats. Blocks as long as the system does."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class NameLookup:
    """Asks `resolver`, each time in a thread of its own. `most`: such threads at a time.

    getaddrinfo cannot be interrupted. A thread that hangs in it is left behind until the system gives up. It delays no
    other lookup, and it does not keep the process from ending.
    """

    def __init__(self, resolver: Resolver, most: int = 512) -> None:
        self._resolver = resolver
        self._free = threading.Semaphore(most)

    async def resolve(self, host: str, port: int) -> list[IPAddress]:
        """Return the addresses of `host`. Raises the resolver's OSError, also for a text that is no host name."""
        if not self._free.acquire(blocking=False):
            raise OSError("too many host names are being looked up")
        answer: Future[Sequence[str]] = Future()
        answer.set_running_or_notify_cancel()
        threading.Thread(target=self._ask, args=(host, port, answer), name="resolve", daemon=True).start()
        try:
            found = [ipaddress.ip_address(text) for text in await asyncio.wrap_future(answer)]
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{host!r} cannot be looked up: {error}") from error
        if not found:
            raise OSError(f"{host!r} has no address")
        return found

    def _ask(self, host: str, port: int, answer: Future[Sequence[str]]) -> None:
        try:
            answer.set_result(self._resolver(host, port))
        except Exception as error:
            answer.set_exception(error)
        finally:
            self._free.release()
