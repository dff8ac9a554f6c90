"""Files of lines: lists of paths and URLs, and what reading any such file takes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

from vlmserve.caption.inputs.files import BROKEN, ItemFile
from vlmserve.caption.inputs.media import MediaReader
from vlmserve.caption.inputs.source import resolved
from vlmserve.caption.item import Found, Unreadable
from vlmserve_common.errors import BadRequestError

MOST_BYTES = 512 * 2**20
"""Of a line: a video at the default limit, in base64, and more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """number: from 1. text: without spaces around it; None if it is longer than `MOST_BYTES`."""

    number: int
    text: bytes | None


def read_lines(file: ItemFile) -> Iterator[Line | Unreadable]:
    """The lines of a file that are not empty. Where it cannot be read further, that is the last that is told."""
    number = 0
    try:
        with file.open() as lines:
            while text := lines.readline(MOST_BYTES + 1):
                number += 1
                too_long = len(text) > MOST_BYTES
                while too_long and text and not text.endswith(b"\n"):
                    text = lines.readline(2**20)
                stripped = text.removeprefix(b"\xef\xbb\xbf").strip()
                if too_long:
                    yield Line(number=number, text=None)
                elif stripped:
                    yield Line(number=number, text=stripped)
    except BROKEN as error:
        yield file.broken(error, done=number, what="line")


def place_of(file: ItemFile, number: int) -> str:
    """Of a line, as "list.txt:3"."""
    return f"{file.name}:{number}"


def too_long(file: ItemFile, number: int) -> Unreadable:
    """What to tell of a line whose text is None."""
    return Unreadable(
        id=place_of(file, number), message=f"the line has more than {MOST_BYTES} bytes", code="invalid_line"
    )


@dataclass(frozen=True, kw_only=True)
class AddressList:
    """See `Source`. A path or URL a line; # begins a comment."""

    file: ItemFile
    media: MediaReader

    def __iter__(self) -> Iterator[Found]:
        for line in read_lines(self.file):
            if isinstance(line, Unreadable):
                yield line
            elif line.text is None:
                yield too_long(self.file, line.number)
            elif not line.text.startswith(b"#"):
                try:
                    yield self.media.item(resolved(os.fsdecode(line.text), self.file.base))
                except BadRequestError as error:
                    yield Unreadable(
                        id=place_of(self.file, line.number), message=error.message, code=error.code or "invalid_line"
                    )

    def count(self) -> Iterator[int | None]:
        """See `Source`."""
        if self.file.path is None:
            return iter((None,))
        return (1 for line in read_lines(self.file) if isinstance(line, Line) and (line.text or b"")[:1] != b"#")
