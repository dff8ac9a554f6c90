"""Remote files and folders, by fsspec: each scheme's own package does the work, and its errors become OSErrors."""

from __future__ import annotations

import contextlib
import glob
import io
import posixpath
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, cast

from processors.fetch.limits import ByteLimit
from processors.inputs import Modality
from vlmserve.commands.batch.inputs.files import HTTP, MediaReader, need, printable, reason
from vlmserve.commands.batch.inputs.trees import Tree, TreeEntry, fixed_part
from vlmserve.commands.batch.item import Failed, MediumItem
from vlmserve.commands.client.media import scheme_of
from vlmserve.config.checks import SettingsError
from vlmserve_common.errors import BadRequestError

# Schemes that an input file may name. Words of the command line may name any.
_STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "hf", "memory")
# Details of fsspec's file systems that differ when a file has changed.
_STAMPS = (
    *("ETag", "etag", "e_tag", "md5", "md5Hash", "Content-MD5", "checksum", "crc32c", "CRC", "sha", "blob_id"),
    *("mtime", "LastModified", "Last-Modified", "last_modified", "updated", "created"),
)
_BUFFER_BYTES = 2**20
_CONNECT_S, _STALL_S = 15.0, 60.0
_CODE = "invalid_media_url"


def file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL, and the path in it. Raises SettingsError, with the package to install."""
    scheme = scheme_of(url)
    need(f"INPUT {url!r}", "fsspec", *(["aiohttp"] if scheme in HTTP else []))
    from fsspec.core import url_to_fs

    try:
        return cast("tuple[Any, str]", url_to_fs(url, use_listings_cache=False, **_options(scheme)))
    except Exception as error:  # an unknown scheme, a missing package, any error of a driver
        raise SettingsError(f"INPUT {url!r}: {reason(error)}") from None


def open_remote(url: str) -> BinaryIO:
    """Open a file for reading from beginning to end, or at any place if its server can. Raises OSError."""
    with _as_os_errors():
        system, path = file_system(url)
        # A server that cannot send parts sends the whole file.
        in_parts = scheme_of(url) not in HTTP or _sends_parts(system, path)
        file = system.open(path, "rb", **({} if in_parts else {"block_size": 0}))
        return cast("BinaryIO", io.BufferedReader(_Remote(file, in_parts=in_parts), _BUFFER_BYTES))


def signature_of(url: str) -> str:
    """Return the signature of a file, see `ItemFile.signature`. Raises OSError."""
    with _as_os_errors():
        system, path = file_system(url)
        info = system.info(path)
        return signature(info) or f"{info.get('size')}"


def signature(info: Mapping[str, Any]) -> str | None:
    """Make a signature of fsspec's details of a file; None if there are too few."""
    stamp = next((info[name] for name in _STAMPS if info.get(name) is not None), None)
    return None if stamp is None else f"{info.get('size')} {stamp}"


def read_whole(url: str, limit: ByteLimit) -> bytes:
    """Read a medium that an input file names. Raises BadRequestError."""
    scheme = scheme_of(url)
    if scheme not in _STORES or "::" in url:
        raise BadRequestError(f"{url!r}: files may name http, https, data and {', '.join(_STORES)} URLs", code=_CODE)
    try:
        system, path = file_system(url)
    except SettingsError as error:
        raise BadRequestError(str(error).removeprefix("INPUT "), code=_CODE) from None
    return read_path(system, path, url, limit)


def read_path(system: Any, path: str, url: str, limit: ByteLimit) -> bytes:
    """Read a file of a file system. url: its name in errors. Raises BadRequestError."""
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

    # A shard may be read for hours; only a stall is an error.
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
    """A file of fsspec. in_parts: it can be read at any place, not forward only."""

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


class RemoteTree(Tree):
    """A tree of remote folders; drivers list one folder at a time. word: as the user wrote it. path: of the word."""

    def __init__(self, word: str, system: Any, path: str, media: MediaReader) -> None:
        self._word = word
        self._system = system
        self._path = path
        self._media = media

    def scan(self, folder: str) -> Iterator[TreeEntry | Failed]:
        try:
            entries = sorted(self._system.ls(folder, detail=True), key=lambda entry: str(entry["name"]))
        except Exception as error:  # whatever a driver raises
            message = f"cannot read the folder: {reason(error)}"
            yield Failed(id=printable(self.address(folder)), message=message)
            return
        for info in entries:
            name = info["name"].strip("/")
            if name != folder.strip("/"):  # which some stores list, too
                is_folder = info["type"] == "directory"
                yield TreeEntry(path=info["name"], name=posixpath.basename(name), is_folder=is_folder, info=info)

    def is_folder(self, path: str) -> bool:
        return bool(self._system.isdir(path))

    def item(self, entry: TreeEntry, root: str) -> MediumItem:
        address = self.address(entry.path)
        return self._media.held(
            lambda: read_path(self._system, entry.path, address, self._media.fetcher.settings.limit(Modality.VIDEO)),
            signature=signature(entry.info),
            size=entry.info.get("size") or 0,
            name=entry.path,
            id=printable(address),
        )

    def address(self, path: str) -> str:
        """Return the URL of a file or folder. It begins like the word."""
        if path.strip("/") == self._path.strip("/"):
            return self._word
        first, chain, rest = self._word.partition("::")
        scheme, _, written = first.partition("://")
        folder = fixed_part(written) if glob.has_magic(written) else written.rstrip("/")
        below = path.strip("/").removeprefix(fixed_part(self._path).strip("/")).strip("/")
        return f"{scheme}://{folder}{'/' if folder else ''}{below}{chain}{rest}"
