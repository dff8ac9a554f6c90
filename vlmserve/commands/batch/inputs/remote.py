"""Files elsewhere, by fsspec: each scheme's own package does the work, and its errors become OSErrors."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, cast

from processors.fetch.settings import ByteLimit
from vlmserve.commands.batch.inputs.source import HTTP, need, reason
from vlmserve.commands.client.media_names import scheme_of
from vlmserve.config.checks import SettingsError
from vlmserve_common.errors import BadRequestError

# What may stand in a file that names others. Words of the command line may name any scheme.
_STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "hf", "memory")
# Of what fsspec's file systems tell about a file, what is another one when it has changed.
_STAMPS = (
    *("ETag", "etag", "e_tag", "md5", "md5Hash", "Content-MD5", "checksum", "crc32c", "CRC", "sha", "blob_id"),
    *("mtime", "LastModified", "Last-Modified", "last_modified", "updated", "created"),
)
_BUFFER_BYTES = 2**20
_CONNECT_S, _STALL_S = 15.0, 60.0
_CODE = "invalid_media_url"


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system for a URL, and the path in it. Raises SettingsError, with what to install."""
    scheme = scheme_of(url)
    need(url, "fsspec", *(["aiohttp"] if scheme in HTTP else []))
    from fsspec.core import url_to_fs

    try:
        return cast("tuple[Any, str]", url_to_fs(url, use_listings_cache=False, **_options(scheme)))
    except Exception as error:  # an unknown scheme, a package that it needs, whatever a driver raises
        raise SettingsError(f"INPUT {url!r}: {reason(error)}") from None


def open_remote(url: str) -> BinaryIO:
    """A file to be read from its beginning to its end, or anywhere if its server can. Raises OSError."""
    with _as_os_errors():
        system, path = file_system(url)
        # A server that sends no parts sends all at once.
        in_parts = scheme_of(url) not in HTTP or _sends_parts(system, path)
        file = system.open(path, "rb", **({} if in_parts else {"block_size": 0}))
        return cast("BinaryIO", io.BufferedReader(_Remote(file, in_parts=in_parts), _BUFFER_BYTES))


def signature_of(url: str) -> str:
    """See `ItemFile.signature`. Raises OSError."""
    with _as_os_errors():
        system, path = file_system(url)
        info = system.info(path)
        return signature(info) or f"{info.get('size')}"


def signature(info: Mapping[str, Any]) -> str | None:
    """What fsspec tells about a file, as a signature; None if it tells too little."""
    stamp = next((info[name] for name in _STAMPS if info.get(name) is not None), None)
    return None if stamp is None else f"{info.get('size')} {stamp}"


def read_whole(url: str, limit: ByteLimit) -> bytes:
    """A medium that a file names. Raises BadRequestError."""
    scheme = scheme_of(url)
    if scheme not in _STORES or "::" in url:
        raise BadRequestError(f"{url!r}: files may name http, https, data and {', '.join(_STORES)} URLs", code=_CODE)
    try:
        system, path = file_system(url)
    except SettingsError as error:
        raise BadRequestError(str(error).removeprefix("INPUT "), code=_CODE) from None
    return read_path(system, path, url, limit)


def read_path(system: Any, path: str, url: str, limit: ByteLimit) -> bytes:
    """A file of a file system. url: its name in errors. Raises BadRequestError."""
    try:
        data = cast("bytes", system.cat_file(path, start=0, end=limit.bytes + 1))
    except Exception as error:
        raise BadRequestError(f"cannot read {url!r}: {reason(error)}", code=_CODE) from None
    if len(data) > limit.bytes:
        what = f"{url!r} has more than {limit.bytes} bytes, which is the limit (setting {limit.setting})"
        raise BadRequestError(what, code=_CODE)
    return data


def _options(scheme: str) -> dict[str, Any]:
    if scheme not in HTTP:
        return {}
    from aiohttp import ClientTimeout

    # A shard may be read for hours; what counts is that something comes.
    return {"client_kwargs": {"timeout": ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_STALL_S)}}


def _sends_parts(system: Any, path: str) -> bool:
    try:
        with system.open(path, "rb", block_size=1) as file:
            file.seek(1)
            file.read(1)
    except ValueError:
        return False
    return True


@contextlib.contextmanager
def _as_os_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise OSError(reason(error)) from None


class _Remote(io.RawIOBase):
    """A file of fsspec's. in_parts: otherwise it only goes forward."""

    def __init__(self, file: Any, *, in_parts: bool) -> None:
        self._file = file
        self._in_parts = in_parts

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with _as_os_errors():
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        with _as_os_errors():
            if self._in_parts:
                self._file.seek(offset, whence)
            elif whence == io.SEEK_SET and offset >= self.tell():
                self._skip(offset - self.tell())
            else:
                raise ValueError("the server sends no parts of files, so it must be downloaded first")
            return self.tell()

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        if not self.closed:
            super().close()
            with contextlib.suppress(Exception):  # it was read only
                self._file.close()

    def _skip(self, size: int) -> None:
        while size > 0 and (data := self._file.read(min(size, _BUFFER_BYTES))):
            size -= len(data)
