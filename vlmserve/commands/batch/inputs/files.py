"""Files that hold many items, local or remote, perhaps compressed; paths and URLs; items of media and records."""

from __future__ import annotations

import datetime
import gzip
import importlib.util
import io
import lzma
import math
import os
import posixpath
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, BinaryIO, Protocol
from urllib.parse import unquote, urljoin, urlsplit

import blake3

from processors.fetch.fetching import BlockingFetcher
from processors.inputs import Modality
from vlmserve.commands.batch.item import Failed, Found, MediumItem
from vlmserve.commands.client.media import local_path, modality_within_limit, scheme_of
from vlmserve.config.checks import SettingsError
from vlmserve_common.errors import BadRequestError
from vlmserve_common.installing import install
from vlmserve_common.process.wake_up import WakeUp

HTTP = ("http", "https")


class Source(Protocol):
    """The items of one word of the command line."""

    def __iter__(self) -> Iterator[Found]:
        """Yield the items from the beginning. Nothing is read before it is asked for."""
        ...

    def count(self) -> Iterator[int | None]:
        """Yield numbers that add up to the count of items; None, as the last, if only reading everything would tell."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Columns:
    """The names of the columns of tables, or fields of JSONL items, that have a meaning of their own.

    media: the medium, or its path or URL; None looks for one of the usual names. prompt, id: the item's own. None
    means "prompt" and "id" in JSONL, and no column in tables, where these names often mean something else.
    """

    media: str | None = None
    prompt: str | None = None
    id: str | None = None


def printable(text: str) -> str:
    """Escape the bytes of a file name that are no text: outputs are UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return os.fsencode(text).decode("utf-8", "backslashreplace")
    return text


def resolved(address: str, base: str) -> str:
    """Return the path or URL of an address in a file. base: the folder of that file, as a path or URL.

    Raises BadRequestError for a remote file that names a local one.
    """
    scheme, where = scheme_of(address), scheme_of(base)
    if scheme == "file":
        if where:
            message = f"{address!r}: a file that came by {where} cannot name local files"
            raise BadRequestError(message, code="invalid_media_url")
        return str(local_path(address))
    if scheme:
        return address
    if not where:
        return os.path.join(base, os.path.expanduser(address))
    if where in HTTP:
        return urljoin(f"{base}/", address)
    first, chain, rest = base.partition("::")
    return f"{first}/{address.lstrip('/')}{chain}{rest}"


def folder_of(address: str) -> str:
    """Return the path or URL of the folder that a file is in."""
    scheme = scheme_of(address)
    if not scheme:
        return os.path.dirname(address)
    if scheme in HTTP:
        address = urlsplit(address)._replace(query="", fragment="").geturl()
    first, chain, rest = address.partition("::")
    return posixpath.dirname(first) + chain + rest


def path_in(address: str) -> str:
    """Return the path of a URL; a path stays as it is."""
    scheme = scheme_of(address)
    if scheme in HTTP:
        return unquote(urlsplit(address).path)
    return address.partition("::")[0].partition("://")[2] if scheme else address


NAME_FIELDS = ("id", "name", "stem", "folder")


def name_fields(id: str, path: str | None) -> dict[str, Any]:
    """Return the fields that every medium has for its prompt. path: None for one without a name."""
    fields: dict[str, Any] = {"id": id}
    if path is not None:
        folder, name = os.path.split(printable(path))
        fields |= {"name": name, "stem": os.path.splitext(name)[0], "folder": os.path.basename(folder)}
    return fields


def reason(error: Exception) -> str:
    """Return the message of an error of the system or of a library."""
    told = getattr(error, "strerror", None)
    if isinstance(error, FileNotFoundError) and not told:
        return "there is no such file or folder"
    return told or str(error) or type(error).__name__


def need(word: str, *packages: str) -> None:
    """Raise SettingsError, naming the package to install, if one is missing. word: the file that needs them, with what
    it is."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise SettingsError(f"{word} needs {package}: {install('caption')}")


BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""All errors that reading any file may raise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemFile:
    """A file that holds many items. address: a path or URL, as the user wrote it.

    stream: yields standard input once, which is then read instead of a file.
    """

    address: str
    stream: Iterator[BinaryIO] | None = None

    @property
    def name(self) -> str:
        """The name in ids and messages."""
        return printable(self.address)

    @property
    def path(self) -> Path | None:
        """The path of a local file."""
        return None if self.stream is not None or scheme_of(self.address) else Path(self.address)

    @property
    def base(self) -> str:
        """The folder of relative addresses in the file; see `resolved`."""
        return "" if self.stream is not None else folder_of(self.address)

    @property
    def is_compressed(self) -> bool:
        """True if the name says so."""
        return path_in(self.address).lower().endswith((".gz", ".tgz"))

    def signature(self) -> str:
        """Return text that differs when the file may have changed, without reading it. Raises OSError."""
        if self.path is not None:
            status = os.stat(self.path)
            return f"{status.st_size} {status.st_mtime_ns}"
        from vlmserve.commands.batch.inputs.remote import signature_of

        return signature_of(self.address)

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Open the content, decompressed. Opening and reading may raise any of `BROKEN`."""
        if self.stream is not None:
            stream = next(self.stream, None)
            if stream is None:
                raise SettingsError("INPUT '-': standard input was read already, and cannot be read again")
            yield stream
            return
        with self._open() as file:
            if self.is_compressed:
                with gzip.GzipFile(fileobj=file) as unpacked:
                    yield unpacked  # type: ignore[misc]
            else:
                yield file

    def _open(self) -> BinaryIO:
        if self.path is not None:
            return self.path.open("rb")
        from vlmserve.commands.batch.inputs.remote import open_remote

        return open_remote(self.address)

    def broken(self, error: Exception, *, done: int, what: str) -> Failed:
        """Return the failure for one of `BROKEN`. done: the number of, say, lines read before. what: "line"."""
        why = reason(error)
        if isinstance(error, EOFError):
            return Failed(id=self.name, message=f"cut off after {what} {done}: {why}", code="cut_off")
        return Failed(id=self.name, message=f"cannot read it{f' after {what} {done}' if done else ''}: {why}")


class StandardInput(io.RawIOBase):
    """Reads a file descriptor until its end, or until `stop`: a thread that waits for more then sees the end.

    A thread in an ordinary read could not be stopped, and would keep the process alive.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._wake_up = WakeUp()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if self._wake_up.fd in wait([self._fd, self._wake_up.fd]):
            return 0
        data = os.read(self._fd, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def stop(self) -> None:
        """End the input. Any thread may call this."""
        self._wake_up.call()


MEDIA_COLUMNS = (
    *("image", "img", "picture", "photo", "video", "clip", "jpg", "jpeg", "png", "webp", "mp4"),
    *("bytes", "image_bytes", "video_bytes", "image_url", "video_url", "image_path", "video_path", "file_path"),
    *("path", "file", "file_name", "filename", "url"),
)
"""The usual names of media, in the order of search. Case does not matter."""
KWARGS = "mm_processor_kwargs"
_CODE = "invalid_item"


class MediaReader:
    """Makes items of media. fetcher: may read any local file, since the user has named it."""

    def __init__(self, fetcher: BlockingFetcher) -> None:
        self.fetcher = fetcher

    def open(self, address: str, modality: Modality | None = None) -> MediumItem:
        """Make an item of the file of a path or URL, without reading it. modality: None accepts any."""
        scheme, url = scheme_of(address), address
        signature: str | None = address
        size, path = 0, None
        if scheme == "data":
            digest = blake3.blake3(address.encode("utf-8", "surrogateescape")).hexdigest()[:32]
            signature = f"data:{digest}"
        elif not scheme:
            path = Path(address)
            url = path.absolute().as_uri()
            try:
                status = os.stat(path)
                signature, size = f"{status.st_size} {status.st_mtime_ns}", status.st_size
            except (OSError, ValueError):  # reading will report it
                signature = None
        id = printable(signature if scheme == "data" and signature else address)
        read = partial(self._read, url, modality)
        return MediumItem(id=id, signature=signature, size=size, path=path, read=read, root=None)

    def item(self, address: str, *, root: Path | None = None, **own: Any) -> MediumItem:
        """Make the item of a path or URL. root, own: fields of `MediumItem` that the source sets."""
        name = None if scheme_of(address) == "data" else path_in(address)
        return _named(replace(self.open(address), root=root, **own), name)

    def held(
        self, read: Callable[[], bytes], *, signature: str | None, size: int, name: str | None, **own: Any
    ) -> MediumItem:
        """Make the item of a medium that `read` returns, such as one inside a larger file. name: its name there."""

        def checked() -> bytes:
            data = read()
            modality_within_limit(data, self.fetcher.settings)
            return data

        return _named(MediumItem(signature=signature, size=size, read=checked, **own), name)

    def _read(self, url: str, modality: Modality | None) -> bytes:
        if scheme_of(url) in ("file", "data", *HTTP):
            data = self.fetcher.fetch(url, modality=modality or Modality.VIDEO)
        else:
            from vlmserve.commands.batch.inputs.remote import read_whole

            data = read_whole(url, self.fetcher.settings.limit(modality or Modality.VIDEO))
        if modality is None:
            modality_within_limit(data, self.fetcher.settings)
        return data


def _named(item: MediumItem, name: str | None) -> MediumItem:
    return replace(item, fields={**name_fields(item.id, name), **item.fields})


def media_column(names: Iterable[str], wanted: str | None) -> str | None:
    """Return the column that holds the medium, if there is one."""
    if wanted is not None:
        return wanted if wanted in set(names) else None
    known = {name.lower(): name for name in reversed(list(names))}
    return next((known[name] for name in MEDIA_COLUMNS if name in known), None)


def item_of(
    record: Mapping[str, Any], column: str, *, id: str, signature: str, base: str, media: MediaReader, columns: Columns
) -> MediumItem:
    """Make the item of a record. id: for a record without one. signature: for a medium inside the record.

    Raises BadRequestError.
    """
    value = record[column]
    own = _own(record, column, id, columns)
    path = None
    if isinstance(value, Mapping):
        path = value["path"] if isinstance(value.get("path"), str) else None
        value = next((value[name] for name in ("bytes", "path", "url") if value.get(name) is not None), None)
    if isinstance(value, bytes):
        return media.held(lambda: value, signature=signature, size=len(value), name=path, **own)
    if not isinstance(value, str) or not value:
        told = "nothing" if value is None else f"a value of type {type(value).__name__}"
        raise BadRequestError(f"{column} is {told}; it must be a path, a URL or a file's bytes", code=_CODE)
    return media.item(resolved(value, base), **own)


def jsonable(value: Any) -> Any:
    """Convert a value to JSON's types, or to text; None for bytes."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {str(name): jsonable(one) for name, one in value.items() if not isinstance(one, bytes)}
    if isinstance(value, list | tuple):
        return [jsonable(one) for one in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    return None if isinstance(value, bytes) else str(value)


def _own(record: Mapping[str, Any], column: str, id: str, columns: Columns) -> dict[str, Any]:

    def own(name: str | None, kind: type | tuple[type, ...], what: str) -> Any:
        value = record.get(name) if name is not None else None
        if value is not None and not isinstance(value, kind):
            raise BadRequestError(f"{name} is of type {type(value).__name__}; it must be {what}", code=_CODE)
        return value

    prompt, given = own(columns.prompt, str, "text"), own(columns.id, (str, int), "text")
    kwargs = own(KWARGS, Mapping, "an object")
    fields = {
        str(name): jsonable(value)
        for name, value in record.items()
        if not isinstance(value, bytes) and name not in (KWARGS, columns.prompt) and not _is_inline(name, column, value)
    }
    return {
        "id": id if given in (None, "") else str(given),
        "fields": fields,
        "prompt": prompt,
        "options": {KWARGS: dict(kwargs)} if kwargs else {},
    }


def _is_inline(name: str, column: str, value: Any) -> bool:
    """Return True for the medium itself, False for its name."""
    return name == column and (isinstance(value, Mapping) or (isinstance(value, str) and scheme_of(value) == "data"))
