"""Makes one HTTP GET for a stranger's URL: pinned addresses, one deadline, no proxies, every size bounded.

httpcore2 speaks HTTP and TLS over the connections that `_PinnedBackend` opens. The backend resolves a host once, checks
every address of the answer, and connects to one of these addresses. So a name server that gives another answer the
second time (DNS rebinding) gains nothing. TLS still verifies the certificate against the host's name.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AsyncExitStack
from functools import partial
from typing import TypeAlias
from weakref import WeakValueDictionary

import httpcore2
import httpx2

from processors.fetch.addresses import NameLookup, Resolver, is_public_address
from processors.fetch.limits import FREE_BYTES, ByteLimit, Claim, FetchSettings, within

_MakeRoom: TypeAlias = Callable[[int], Awaitable[None]]
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_DEFAULT_PORTS = {"http": 80, "https": 443}
_NUMBER = re.compile(r"\[Errno -?\d+\] ")


class GetError(Exception):
    """The GET failed. The text gives the reason, in words for the client that sent the URL."""


class HttpGetter:
    """Fetches http: and https: URLs, in one event loop."""

    def __init__(self, settings: FetchSettings, resolver: Resolver, ssl_context: ssl.SSLContext | None = None) -> None:
        self._settings = settings
        self._headers = [
            ("User-Agent", settings.user_agent),
            ("Accept", "image/*,*/*;q=0.5"),
            ("Accept-Encoding", "identity"),
        ]
        self._ssl_context = ssl_context if ssl_context is not None else httpcore2.default_ssl_context()
        self._backend = _PinnedBackend(NameLookup(resolver), settings)
        self._hosts: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def get(self, url: str, size: ByteLimit, claim: Claim | None) -> bytes:
        """Return the body behind `url`, following redirects. Raises GetError. `claim`: takes memory for a large body.

        The deadline includes neither the wait for other GETs from the same host nor the wait for memory.
        """
        target = self._parse(url, None)
        host = self._hosts.setdefault(target.host, asyncio.Semaphore(self._settings.max_per_host))
        try:
            async with AsyncExitStack() as turn:
                await turn.enter_async_context(host)
                async with asyncio.timeout(self._settings.timeout_s) as deadline:
                    make_room = partial(_make_room, claim, turn, deadline)
                    for _ in range(self._settings.max_redirects + 1):
                        result = await self._get_once(target, size, make_room)
                        if isinstance(result, bytes):
                            return result
                        target = self._parse(result, target)
        except (TimeoutError, httpcore2.TimeoutException):
            raise GetError(
                f"{target.host!r} did not deliver within {self._settings.timeout_s:g} s (setting --media-timeout-s)"
            ) from None
        except (httpcore2.NetworkError, httpcore2.ProtocolError, OSError, ValueError) as error:
            raise GetError(f"cannot fetch from {target.host!r}: {_reason(error)}") from error
        raise GetError(f"more than {self._settings.max_redirects} redirects (setting --media-max-redirects)")

    def _parse(self, url: str, base: httpx2.URL | None) -> httpx2.URL:
        where = "redirected to " if base is not None else ""
        try:
            parsed = httpx2.URL(url) if base is None else base.join(url)
        except (httpx2.InvalidURL, ValueError) as error:
            raise GetError(f"{where}a malformed URL: {error}") from None
        if parsed.scheme not in _DEFAULT_PORTS:
            raise GetError(f"{where}a {parsed.scheme or 'relative'} URL, only http and https are followed")
        if not parsed.host:
            raise GetError(f"{where}a URL without a host")
        if "%" in parsed.host or (parsed.port is not None and not 0 < parsed.port < 65536):
            raise GetError(f"{where}a malformed URL: no such host or port")
        if parsed.userinfo:
            raise GetError(f"{where}a URL with a user name or password, which is not supported")
        domains = self._settings.allowed_media_domains
        if domains is not None and not any(within(parsed.host, domain) for domain in domains):
            raise GetError(f"{where}host {parsed.host!r}, which is not in the setting --allowed-media-domains")
        return parsed

    async def _get_once(self, url: httpx2.URL, size: ByteLimit, make_room: _MakeRoom) -> bytes | str:
        """Return the body, or the address that the answer redirects to."""
        target = httpcore2.URL(
            scheme=url.raw_scheme,
            host=url.raw_host,
            port=url.port or _DEFAULT_PORTS[url.scheme],
            target=url.raw_path,
        )
        headers = [("Host", url.netloc.decode("ascii")), *self._headers]
        # A pool made by hand: httpcore2 reads no proxy settings from the environment.
        async with (
            httpcore2.AsyncConnectionPool(
                ssl_context=self._ssl_context, network_backend=self._backend, retries=0
            ) as pool,
            pool.stream("GET", target, headers=headers) as response,
        ):
            fields = {name.lower(): value.decode("latin-1") for name, value in response.headers}
            if response.status in _REDIRECTS:
                if not fields.get(b"location"):
                    raise GetError(f"{url.host!r} answered {response.status} without a Location")
                return fields[b"location"]
            if response.status != 200:
                raise GetError(f"{url.host!r} answered with HTTP status {response.status}")
            encoding = fields.get(b"content-encoding", "identity").strip().lower()
            if encoding not in ("identity", ""):
                raise GetError(f"{url.host!r} answered with Content-Encoding {encoding!r} though none was accepted")
            return await self._read_body(response, fields.get(b"content-length", ""), size, make_room)

    async def _read_body(
        self, response: httpcore2.Response, declared: str, size: ByteLimit, make_room: _MakeRoom
    ) -> bytes:
        limit = expected = size.bytes
        if re.fullmatch(r"[0-9]{1,18}", declared):
            expected = int(declared)
            if expected > limit:
                raise GetError(f"{expected} bytes, more than the limit of {limit} (setting {size.setting})")
        body = bytearray()
        async for chunk in response.aiter_stream():
            body += chunk
            if len(body) > limit:
                raise GetError(f"more than the limit of {limit} bytes (setting {size.setting})")
            if len(body) > FREE_BYTES:
                await make_room(expected)
        return bytes(body)


async def _make_room(claim: Claim | None, turn: AsyncExitStack, deadline: asyncio.Timeout, size: int) -> None:
    """Wait for memory. Meanwhile the deadline stands still and the host's turn is free: a GET that has memory may need
    it."""
    if claim is None or claim.taken:
        return
    if not claim.fits(size):
        await turn.aclose()
    when, clock = deadline.when(), asyncio.get_running_loop().time
    assert when is not None
    left = when - clock()
    deadline.reschedule(None)
    await claim.take(size)
    deadline.reschedule(clock() + left)


def _reason(error: BaseException) -> str:
    """Return an error's words, or its cause's words if it has none."""
    while not str(error) and (error.__cause__ or error.__context__):
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return _NUMBER.sub("", str(error)) or type(error).__name__


class _PinnedBackend(httpcore2.AsyncNetworkBackend):
    """Opens connections to checked addresses only."""

    def __init__(self, lookup: NameLookup, settings: FetchSettings) -> None:
        self._lookup = lookup
        self._settings = settings
        self._plain = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        addresses = await self._lookup.resolve(host, port)
        if not self._settings.allow_private_media and not all(map(is_public_address, addresses)):
            raise GetError(
                f"{host!r} is at a private or reserved address, which is refused (setting --allow-private-media)"
            )
        failure: Exception | None = None
        for address in addresses:
            try:
                # Each gets its share of the time, should one swallow packets.
                share = self._settings.timeout_s / len(addresses)
                return await self._plain.connect_tcp(str(address), port, share, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = error
        assert failure is not None  # resolve() never returns an empty list
        raise failure
