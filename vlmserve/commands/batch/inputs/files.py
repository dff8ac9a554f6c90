"""Files that hold many items: local or remote, perhaps compressed; and standard input."""

from __future__ import annotations

import gzip
import io
import lzma
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import BinaryIO

from vlmserve.commands.batch.inputs.source import folder_of, path_in, printable, reason
from vlmserve.commands.batch.item import Failed
from vlmserve.commands.client.media import scheme_of
from vlmserve.config.checks import SettingsError
from vlmserve_common.process.wake_up import WakeUp

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
