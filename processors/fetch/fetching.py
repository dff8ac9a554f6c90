"""Fetches media URLs: data:, http(s): and, where allowed, file:. Every failure is a 400 of the request itself."""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import re
import ssl
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from processors.fetch.addresses import Resolver, system_resolver
from processors.fetch.limits import ByteLimit, Claim, FetchSettings, MediaMemory
from processors.inputs import Modality
from vlmserve_common.errors import BadRequestError
from vlmserve_common.process.loop_thread import LoopThread

if TYPE_CHECKING:
    from processors.fetch.http_get import HttpGetter


_P = ParamSpec("_P")
_T = TypeVar("_T")
_SMALL_BYTES = 256 * 1024
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*):")
_WHITESPACE = b" \t\r\n\f"
_CODE = "invalid_media_url"
_DISK_THREADS = 8
_PIECE_BYTES = 256 * 1024  # a multiple of 4, which are decoded together


class MediaFile(ABC):
    """A medium that the server already holds, such as an uploaded file. It can replace a URL, and a thread reads it
    when it is needed.

    `modality`: by the file's first bytes; None if they belong to neither a picture nor a video.
    """

    modality: Modality | None

    @abstractmethod
    def read(self, limit: ByteLimit) -> bytes:
        """Return the whole file. Raises BadRequestError if it is gone or larger than the limit."""


async def off_loop(size: int, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Call a function that goes through `size` bytes. More than a few run in a thread, so that the event loop stays
    free."""
    if size <= _SMALL_BYTES:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


class MediaFetcher:
    """Fetches media by URL, in one event loop. Cancelling a call ends its transfer.

    `resolver`, `ssl_context`: replace the system's, for tests and unusual networks.
    """

    def __init__(
        self,
        settings: FetchSettings,
        *,
        resolver: Resolver = system_resolver,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self.settings = settings
        self._resolver = resolver
        self._ssl_context = ssl_context
        self._memory = MediaMemory(settings.memory_mib)
        self._http: HttpGetter | None = None
        self._making_http = asyncio.Lock()
        self._disk = ThreadPoolExecutor(_DISK_THREADS, thread_name_prefix="media-disk")
        self._disk_turns = asyncio.Semaphore(_DISK_THREADS)

    def claim(self) -> Claim:
        """Return a claim on memory for one medium."""
        return Claim(self._memory)

    async def fetch(
        self,
        source: str | MediaFile,
        *,
        param: str | None = None,
        modality: Modality = Modality.IMAGE,
        claim: Claim | None = None,
    ) -> bytes:
        """Return the bytes of a URL or file. The modality sets the size limit.

        `claim`: takes the memory for them; None if the caller accounts for it. Raises BadRequestError (with `param`)
        for any failure.
        """
        limit = self.settings.limit(modality)
        try:
            if isinstance(source, MediaFile):
                return await self._read(source.read, limit, claim)
            return await self._fetch(source, limit, claim)
        except BadRequestError as error:
            error.param = error.param or param
            raise

    def close(self) -> None:
        """Stop fetching. A read that waits for a slow disk ends by itself later."""
        self._disk.shutdown(wait=False, cancel_futures=True)

    async def _fetch(self, url: str, limit: ByteLimit, claim: Claim | None) -> bytes:
        match = _SCHEME.match(url)
        scheme = match.group(1).lower() if match else ""
        if scheme == "data":
            if claim is not None:
                await claim.take(min(len(url), limit.bytes))
            return await off_loop(len(url), decode_data_url, url, limit)
        if scheme in ("http", "https"):
            return await self._get(url, limit, claim)
        if scheme == "file":
            return await self._read(partial(self._read_file, url), limit, claim)
        raise BadRequestError(_explain_scheme(url, scheme), code=_CODE)

    async def _get(self, url: str, limit: ByteLimit, claim: Claim | None) -> bytes:
        async with self._making_http:
            if self._http is None:
                self._http = await asyncio.to_thread(self._make_getter)
        from processors.fetch.http_get import GetError

        try:
            return await self._http.get(url, limit, claim)
        except GetError as error:
            raise BadRequestError(f"media URL {_shorten(url)}: {error}", code=_CODE) from error

    def _make_getter(self) -> HttpGetter:
        # At the first http URL: loading the library and the system's certificates takes time and memory.
        from processors.fetch.http_get import HttpGetter

        return HttpGetter(self.settings, self._resolver, self._ssl_context)

    async def _read(self, read: Callable[[ByteLimit], bytes], limit: ByteLimit, claim: Claim | None) -> bytes:
        async with self._disk_turns:
            data = await asyncio.get_running_loop().run_in_executor(self._disk, read, limit)
            if claim is None:
                return data
            size = len(data)
            if claim.fits(size):
                await claim.take(size)
                return data
        del data  # while waiting, hold neither bytes nor a turn: a medium that has memory may need the turn
        await claim.take(size)
        return await self._read(read, limit, claim)

    def _read_file(self, url: str, limit: ByteLimit) -> bytes:
        root = self.settings.allowed_local_media_path
        if root is None:
            raise BadRequestError("file: URLs are refused (setting --allowed-local-media-path)", code=_CODE)
        path = _local_path(url)
        root = os.path.realpath(root)
        inside = os.path.relpath(os.path.realpath(path), root)
        if inside == os.curdir or inside.split(os.sep)[0] == os.pardir:
            raise BadRequestError(
                f"{_shorten(url)} is not below the folder of the setting --allowed-local-media-path", code=_CODE
            )
        try:
            return _read_below(root, inside.split(os.sep), url, limit)
        except OSError as error:
            raise BadRequestError(f"cannot read {_shorten(url)}: {error.strerror}", code=_CODE) from None


def decode_data_url(url: str, limit: ByteLimit) -> bytes:
    """Return the bytes of a data: URL. Raises BadRequestError."""
    header, comma, payload = url.partition(",")
    if not comma:
        raise BadRequestError("data: URL without a comma before its data", code=_CODE)
    if not header.lower().endswith(";base64"):
        raise BadRequestError(
            f"data: URL {_shorten(header)} is not base64: write data:image/png;base64,...", code=_CODE
        )
    try:
        raw = payload.encode("ascii")
    except UnicodeEncodeError as error:
        raise BadRequestError(
            f"data: URL is not valid base64: foreign character {payload[error.start]!r}", code=_CODE
        ) from None
    if b"%" in raw:
        raw = b"".join(unquote_to_bytes(piece) for piece in _pieces_of_escapes(raw))
    if any(space in raw for space in _WHITESPACE):
        raw = b"".join(piece.translate(None, _WHITESPACE) for piece in _pieces(raw))
    size = len(raw) * 3 // 4
    if size > limit.bytes + 2:  # two of them may be padding
        raise _too_large(f"data: URL of about {size}", limit)
    if len(raw) % 4 and not raw.endswith(b"="):
        raw += b"=" * (-len(raw) % 4)  # padding is optional, as in browsers
    try:
        if raw.find(b"=", 0, -2) >= 0:
            raise ValueError("padding before its end")
        data = b"".join(base64.b64decode(piece, validate=True) for piece in _pieces(raw))
    except (binascii.Error, ValueError) as error:
        raise BadRequestError(f"data: URL is not valid base64: {error}", code=_CODE) from None
    if len(data) > limit.bytes:
        raise _too_large(f"data: URL of {len(data)}", limit)
    return data


def _pieces(data: bytes) -> Iterator[bytes]:
    """Cut data into pieces. Decoding holds Python's lock: in one go it would stop the event loop for tens of
    milliseconds."""
    return (data[start : start + _PIECE_BYTES] for start in range(0, len(data), _PIECE_BYTES))


def _local_path(url: str) -> str:
    """Return the path in a file: URL. Raises BadRequestError for text that cannot be a path."""
    try:
        parts = urlsplit(url)
        path = unquote(parts.path, errors="surrogateescape")
        if parts.netloc in ("", "localhost") and path.startswith("/") and b"\0" not in os.fsencode(path):
            return path
    except ValueError:  # a host with an open bracket, say, or half a character in the path
        pass
    raise BadRequestError(f"{_shorten(url)} is not of the form file:///absolute/path", code=_CODE)


def _pieces_of_escapes(data: bytes) -> Iterator[bytes]:
    """Cut data between percent-encoded bytes. Decoding these makes an object of each, so one piece at a time saves
    memory."""
    start = 0
    while start < len(data):
        end = start + _PIECE_BYTES
        cut = data.rfind(b"%", end - 2, end)
        end = end if cut < 0 else cut
        yield data[start:end]
        start = end


def _read_below(root: str, names: list[str], url: str, limit: ByteLimit) -> bytes:
    """Walk down from `root` without following links, so that a link created after the check cannot lead outside."""
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for depth, name in enumerate(names, 1):
            # Not blocking: opening a pipe without a writer would hang.
            kind = os.O_NONBLOCK if depth == len(names) else os.O_DIRECTORY
            below = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | kind, dir_fd=fd)
            os.close(fd)
            fd = below
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise BadRequestError(f"{_shorten(url)} is not a regular file", code=_CODE)
        if status.st_size > limit.bytes:
            raise _too_large(f"file of {status.st_size}", limit)
        with os.fdopen(fd, "rb", closefd=False) as file:
            data = file.read(limit.bytes + 1)
    finally:
        os.close(fd)
    if len(data) > limit.bytes:  # it grew, or it is one of those that claim to be empty
        raise _too_large(f"file of more than {limit.bytes}", limit)
    return data


def _too_large(what: str, limit: ByteLimit) -> BadRequestError:
    return BadRequestError(f"{what} bytes, the limit is {limit.bytes} (setting {limit.setting})", code=_CODE)


def _explain_scheme(url: str, scheme: str) -> str:
    if not url.strip():
        return "empty media URL"
    if url.startswith("file-"):
        return f"{_shorten(url)} is no media URL; the id of an uploaded file belongs into file_id, in the place of url"
    if scheme:
        return f"media URL {_shorten(url)}: scheme {scheme!r} is not supported, only data, http, https and file"
    return (
        f"{_shorten(url)} is not a media URL: it must begin with data:, http:, https: or file:; a file of the client's "
        "is sent as data:image/png;base64,..."
    )


def _shorten(text: str, limit: int = 100) -> str:
    return repr(text if len(text) <= limit else text[:limit] + "...")


class BlockingFetcher:
    """A `MediaFetcher` for threads that have no event loop. Thread-safe. Close it when done."""

    def __init__(self, settings: FetchSettings) -> None:
        self.settings = settings
        self._fetcher = MediaFetcher(settings)
        self._loop = LoopThread("fetch")
        self._closed = False

    def fetch(self, url: str, *, modality: Modality = Modality.IMAGE) -> bytes:
        try:
            return self._loop.run(self._fetcher.fetch(url, modality=modality))
        except (CancelledError, RuntimeError):
            if not self._closed:
                raise
            raise BadRequestError(f"{url[:100]!r} was not fetched: no more is", code="invalid_media_url") from None

    def close(self) -> None:
        """Break off downloads under way and refuse new ones."""
        self._closed = True
        self._loop.close()
        self._fetcher.close()
