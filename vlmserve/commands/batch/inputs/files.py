"""Files that hold many items: local or remote, perhaps compressed."""

from __future__ import annotations

import gzip
import lzma
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from vlmserve.commands.batch.inputs.source import folder_of, path_in, printable, reason
from vlmserve.commands.batch.item import Failed
from vlmserve.commands.client.media_names import scheme_of
from vlmserve.config.checks import SettingsError

BROKEN = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""What reading a file may raise, whatever it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemFile:
    """address: a path or URL, as the user wrote it. stream: has what is read in the place of a file, which cannot be
    gone through again: standard input."""

    address: str
    stream: Iterator[BinaryIO] | None = None

    @property
    def name(self) -> str:
        """What it is called in ids and messages."""
        return printable(self.address)

    @property
    def path(self) -> Path | None:
        """Of a local one."""
        return None if self.stream is not None or scheme_of(self.address) else Path(self.address)

    @property
    def base(self) -> str:
        """Where the addresses in it begin; see `resolved`."""
        return "" if self.stream is not None else folder_of(self.address)

    @property
    def is_compressed(self) -> bool:
        """By its name."""
        return path_in(self.address).lower().endswith((".gz", ".tgz"))

    def signature(self) -> str:
        """Another one when it has changed, as far as that can be known without reading it. May raise OSError."""
        if self.path is not None:
            status = os.stat(self.path)
            return f"{status.st_size} {status.st_mtime_ns}"
        from vlmserve.commands.batch.inputs.remote import signature_of

        return signature_of(self.address)

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """What it holds, decompressed. May raise OSError, here and on reading."""
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
        """To be told where reading raised `BROKEN`. done: how many lines, say, had been read. what: "line"."""
        why = reason(error)
        if isinstance(error, EOFError):
            return Failed(id=self.name, message=f"cut off after {what} {done}: {why}", code="cut_off")
        return Failed(id=self.name, message=f"cannot read it{f' behind {what} {done}' if done else ''}: {why}")
