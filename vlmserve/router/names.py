"""DNS names that stand for several servers, such as a headless service of Kubernetes."""

from __future__ import annotations

import asyncio
import socket
from urllib.parse import urlsplit

from vlmserve_common.transport.addresses import tcp_url

_NO_ADDRESS = (socket.EAI_NONAME, socket.EAI_NODATA)


async def servers_of(url: str) -> frozenset[str]:
    """Return a URL for each address that the name in `url` has now; none if DNS says that it has none. Raises OSError
    if it cannot be looked up."""
    at = urlsplit(url)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(at.hostname, at.port or 80, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in _NO_ADDRESS:
            return frozenset()
        raise
    return frozenset(tcp_url(str(address[0]), int(address[1])).replace("tcp", "http", 1) for *_, address in found)
