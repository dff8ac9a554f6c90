"""The bytes of files, by names of ours: in a folder of this machine, or anywhere that fsspec reaches."""

from __future__ import annotations

import io
import os
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast
from urllib.parse import urlsplit

from vlmserve.api.stores.rows import NO_SPACE, StoreUnavailableError
from vlmserve.config.checks import SettingsError
from vlmserve_common.errors import BadRequestError, first_line


class Contents(Protocol):
    """A store of bytes, for many threads. Its methods raise OSError, or StoreUnavailableError for one elsewhere."""

    def create(self, name: str) -> BinaryIO:
        """Return new bytes to write."""

    def settle(self, file: BinaryIO) -> None:
        """Close new bytes so that they last, whatever ends the machine."""

    def open(self, name: str) -> BinaryIO:
        """Return bytes to read, from any place. Raises FileNotFoundError."""

    def remove(self, name: str) -> None:
        """Remove bytes, if they are there."""


class FolderContents:
    """Files NAME.bin of a folder. Only this user can read them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def create(self, name: str) -> BinaryIO:
        """Create a file."""
        return os.fdopen(os.open(self._path(name), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb")

    def settle(self, file: BinaryIO) -> None:
        """Write a file and its name to disk, and close it."""
        file.flush()
        os.fsync(file.fileno())
        file.close()
        fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def open(self, name: str) -> BinaryIO:
        """Open a file, which stays readable while it is open."""
        return self._path(name).open("rb")

    def remove(self, name: str) -> None:
        """Remove a file."""
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.bin"


class FsspecContents:
    """Bytes below a URL of fsspec, such as s3://BUCKET/FOLDER or file:///FOLDER. Raises SettingsError if fsspec does
    not know it, and StoreUnavailableError if it cannot be reached."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self._password = urlsplit(url).password or ""
        try:
            with self._reached(ImportError, ValueError):
                self._files, self._root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise SettingsError(f"--file-store-url cannot be used: {first_line(error)}") from None

    def create(self, name: str) -> BinaryIO:
        """Begin an object."""
        with self._reached():
            return cast("BinaryIO", _Guarded(self._files.open(self._path(name), "wb"), self._reached()))

    def settle(self, file: BinaryIO) -> None:
        """End an object. Where it is a file, it is written to disk."""
        with suppress(io.UnsupportedOperation), self._reached(io.UnsupportedOperation):
            file.flush()
            os.fsync(file.fileno())
        file.close()

    def open(self, name: str) -> BinaryIO:
        """Open an object."""
        with self._reached(FileNotFoundError):
            raw = _Guarded(self._files.open(self._path(name), "rb"), self._reached())
        return cast("BinaryIO", io.BufferedReader(raw, 2**20))

    def remove(self, name: str) -> None:
        """Remove an object."""
        with suppress(FileNotFoundError), self._reached(FileNotFoundError):
            self._files.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}.bin"

    def _reached(self, *passed: type[Exception]) -> _Reached:
        return _Reached(self._password, passed)


class _Reached(AbstractContextManager["_Reached"]):
    """Turns errors of a store elsewhere into ours, but those that are passed. It may be entered many times. password:
    is in no message."""

    def __init__(self, password: str, passed: tuple[type[Exception], ...]) -> None:
        self._password = password
        self._passed = passed

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, self._passed):
            return
        if isinstance(error, OSError) and error.errno in NO_SPACE:
            what = "the store of uploaded files is full (setting --file-store-url)"
            raise BadRequestError(what, code="storage_full", status=507) from None
        why = first_line(error)
        if self._password:
            why = why.replace(self._password, "...")
        what = f"the store of uploaded files cannot be reached now: {why} (setting --file-store-url)"
        raise StoreUnavailableError(what) from None


class _Guarded(io.RawIOBase):
    """A file of fsspec whose errors are ours."""

    def __init__(self, file: Any, reached: _Reached) -> None:
        self._file = file
        self._reached = reached

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def fileno(self) -> int:
        return int(self._file.fileno())

    def readinto(self, buffer: Any) -> int:
        with self._reached:
            data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def write(self, data: Any) -> int:
        with self._reached:
            self._file.write(data)
        return len(data)

    def flush(self) -> None:
        if not self.closed:
            with self._reached:
                self._file.flush()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        with self._reached:
            return int(self._file.seek(offset, whence))

    def close(self) -> None:
        if not self.closed:
            super().close()
            with self._reached:
                self._file.close()
