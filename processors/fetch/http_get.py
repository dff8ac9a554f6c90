"""One HTTP GET that a stranger's URL may drive: pinned addresses, one deadline, no proxies, bounded everything.

httpcore2 speaks HTTP and TLS over the connections that `_PinnedBackend` opens. The backend resolves a host once,
checks every address of the answer, and connects to an address of that very answer, so that a name server which answers
differently the second time (DNS rebinding) gains nothing. TLS still verifies the certificate against the host's name.
"""

from __future__ import annotations

import contextlib
import copy
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import httpcore2
import httpx2

from processors.fetch.addresses import Resolver, is_public_address, resolve
from processors.fetch.byte_limit import ByteLimit

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_DEFAULT_PORTS = {"http": 80, "https": 443}
_NUMBER = re.compile(r"\[Errno -?\d+\] ")


class GetError(Exception):
    """The GET came to nothing; the text says why, in words fit for the client that gave the URL."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GetLimits:
    """What a GET may cost and where it may go; see `processors.fetch.fetching.FetchSettings` for the fields."""

    timeout_s: float
    max_redirects: int
    allow_private_media: bool
    allowed_media_domains: tuple[str, ...] | None


class HttpGetter:
    """Fetches http: and https: URLs. Thread-safe; `close` breaks off what is under way."""

    def __init__(
        self, limits: GetLimits, resolver: Resolver, user_agent: str, ssl_context: ssl.SSLContext | None = None
    ) -> None:
        self._limits = limits
        self._resolver = resolver
        self._headers = [("User-Agent", user_agent), ("Accept", "image/*,*/*;q=0.5"), ("Accept-Encoding", "identity")]
        self._ssl_context = ssl_context if ssl_context is not None else httpcore2.default_ssl_context()
        self._sockets = _OpenSockets()

    def get(self, url: str, size: ByteLimit) -> bytes:
        """The body behind `url`, redirects followed. Raises GetError."""
        deadline = time.monotonic() + self._limits.timeout_s
        target = self._parse(url, None)
        try:
            for _ in range(self._limits.max_redirects + 1):
                result = self._get_once(target, deadline, size)
                if isinstance(result, bytes):
                    return result
                target = self._parse(result, target)
        except (TimeoutError, httpcore2.TimeoutException):
            raise GetError(
                f"{target.host!r} did not deliver within {self._limits.timeout_s:g} s (setting --media-timeout-s)"
            ) from None
        except (httpcore2.NetworkError, httpcore2.ProtocolError, OSError, ValueError) as error:
            raise GetError(f"cannot fetch from {target.host!r}: {_reason(error)}") from error
        raise GetError(f"more than {self._limits.max_redirects} redirects (setting --media-max-redirects)")

    def child(self) -> HttpGetter:
        """Another one like this, whose GETs end with it, and which may be closed by itself."""
        child = copy.copy(self)
        child._sockets = _OpenSockets(self._sockets)
        return child

    def close(self) -> None:
        """Break off every GET under way, and refuse new ones."""
        self._sockets.close()

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
        domains = self._limits.allowed_media_domains
        if domains is not None and not any(_within(parsed.host, domain) for domain in domains):
            raise GetError(f"{where}host {parsed.host!r}, which is not in the setting --allowed-media-domains")
        return parsed

    def _get_once(self, url: httpx2.URL, deadline: float, size: ByteLimit) -> bytes | str:
        """The body, or where the answer redirects to."""
        backend = _PinnedBackend(
            self._resolver, self._limits.allow_private_media, lambda: deadline - time.monotonic(), self._sockets
        )
        target = httpcore2.URL(
            scheme=url.raw_scheme,
            host=url.raw_host,
            port=url.port or _DEFAULT_PORTS[url.scheme],
            target=url.raw_path,
        )
        headers = [("Host", url.netloc.decode("ascii")), *self._headers]
        # A pool made by hand: httpcore2 reads no proxy settings from the environment.
        with (
            httpcore2.ConnectionPool(ssl_context=self._ssl_context, network_backend=backend, retries=0) as pool,
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
            return self._read_body(response, fields.get(b"content-length", ""), size)

    def _read_body(self, response: httpcore2.Response, declared: str, size: ByteLimit) -> bytes:
        limit = size.bytes
        if re.fullmatch(r"[0-9]{1,18}", declared) and int(declared) > limit:
            raise GetError(f"{int(declared)} bytes, more than the limit of {limit} (setting {size.setting})")
        body = bytearray()
        for chunk in response.iter_stream():
            body += chunk
            if len(body) > limit:
                raise GetError(f"more than the limit of {limit} bytes (setting {size.setting})")
        return bytes(body)


def _within(host: str, domain: str) -> bool:
    """Whether `host` is `domain`, or, for a domain written with a leading dot, anything below it."""
    host, domain = host.lower().rstrip("."), domain.lower().rstrip(".")
    return host.endswith(domain) if domain.startswith(".") else host == domain


def _reason(error: BaseException) -> str:
    """The words of an error, those of its cause where it has none itself."""
    while not str(error) and (error.__cause__ or error.__context__):
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return _NUMBER.sub("", str(error)) or type(error).__name__


class _OpenSockets:
    """The sockets in use, so that another thread can wake those who wait on them. They are its parent's, too."""

    def __init__(self, parent: _OpenSockets | None = None) -> None:
        self._parent = parent
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._closed = False

    @contextlib.contextmanager
    def guard(self, stream: httpcore2.NetworkStream) -> Iterator[None]:
        """While the block runs, `close` may shut the stream's socket down."""
        sock = stream.get_extra_info("socket")
        with self._parent.guard(stream) if self._parent else contextlib.nullcontext():
            with self._lock:
                if self._closed:
                    raise httpcore2.ReadError("the server is shutting down")
                self._open.add(sock)
            try:
                yield
            finally:
                with self._lock:
                    self._open.discard(sock)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for sock in self._open:
                with contextlib.suppress(OSError):
                    # Not SSLSocket.shutdown: it would pull the TLS state from under the reading thread.
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)


class _PinnedBackend(httpcore2.NetworkBackend):
    """Opens connections to checked addresses only, within what `remaining` seconds are left."""

    def __init__(
        self, resolver: Resolver, allow_private: bool, remaining: Callable[[], float], sockets: _OpenSockets
    ) -> None:
        self._resolver = resolver
        self._allow_private = allow_private
        self._remaining = remaining
        self._sockets = sockets
        self._plain = httpcore2.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.NetworkStream:
        addresses = resolve(self._resolver, host, port, self._remaining())
        if not self._allow_private and not all(is_public_address(address) for address in addresses):
            raise GetError(
                f"{host!r} is at a private or reserved address, which is refused (setting --allow-private-media)"
            )
        failure: Exception | None = None
        for place, address in enumerate(addresses):
            # Later addresses get their share of the time, should earlier ones swallow packets.
            share = _positive(self._remaining()) / (len(addresses) - place)
            try:
                stream = self._plain.connect_tcp(str(address), port, share, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = error
            else:
                return _DeadlineStream(stream, self._remaining, self._sockets)
        assert failure is not None  # resolve() never returns an empty list
        raise failure


class _DeadlineStream(httpcore2.NetworkStream):
    """A connection whose every operation ends when `remaining` seconds are used up."""

    def __init__(self, stream: httpcore2.NetworkStream, remaining: Callable[[], float], sockets: _OpenSockets) -> None:
        self._stream = stream
        self._remaining = remaining
        self._sockets = sockets

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        with self._sockets.guard(self._stream):
            return self._stream.read(max_bytes, _positive(self._remaining()))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        with self._sockets.guard(self._stream):
            self._stream.write(buffer, _positive(self._remaining()))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore2.NetworkStream:
        with self._sockets.guard(self._stream):
            secure = self._stream.start_tls(ssl_context, server_hostname, _positive(self._remaining()))
        return _DeadlineStream(secure, self._remaining, self._sockets)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _positive(seconds: float) -> float:
    if seconds <= 0:
        raise TimeoutError("deadline passed")
    return seconds
