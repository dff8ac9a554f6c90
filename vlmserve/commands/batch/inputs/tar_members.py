"""The files in a tar, one after the other, by `tarfile`: nothing is unpacked, and no list of them is kept."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from typing import BinaryIO, cast

from vlmserve.commands.batch.inputs.source import reason

_MOST_HEADER_BYTES = 2**20


def members(file: BinaryIO) -> Iterator[tarfile.TarInfo]:
    """The regular files in a tar, while `file` stands at the beginning of their bytes, which may be read from there.

    `file` is only read forward. Raises EOFError for a tar that ends too early, OSError for a
    damaged one.
    """
    headers = _Headers(file)
    try:
        archive = tarfile.TarFile(fileobj=cast("BinaryIO", headers))
        at = -1
        while (member := archive.next()) is not None:
            if archive.offset <= at:  # sizes may be negative
                raise OSError("a header leads backwards")
            at = archive.offset
            archive.members.clear()  # type: ignore[attr-defined]  # it keeps a list of all
            if member.isreg() and not member.issparse():
                yield member
    except Exception as error:  # whatever tarfile makes of a header that somebody made up
        kind = EOFError if headers.ended or isinstance(error, EOFError) else OSError
        raise kind(reason(error)) from None
    # It takes damaged headers, and none at all, for the end.
    if headers.ended:
        raise EOFError("its end mark is missing")
    if any(headers.last):
        raise OSError("a header is damaged")


class _Headers:
    """What tarfile reads by itself are headers: of one that claims to be huge, nothing is read.

    last: what was read last. ended: that was less than there should have been.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.last = b""
        self.ended = False

    def read(self, size: int) -> bytes:
        if not 0 <= size <= _MOST_HEADER_BYTES:
            raise OSError(f"a header of {size} bytes")
        self.last = self._file.read(size)
        self.ended = len(self.last) < size
        return self.last

    def seek(self, position: int) -> int:
        return self._file.seek(position)

    def tell(self) -> int:
        return self._file.tell()
