"""Files with an item a line: a path or URL, or an object of JSON."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from vlmserve.api.body import json_object
from vlmserve.commands.batch.inputs.chats import is_request, request_item
from vlmserve.commands.batch.inputs.files import BROKEN, ItemFile
from vlmserve.commands.batch.inputs.media import MediaReader
from vlmserve.commands.batch.inputs.records import item_of, media_column
from vlmserve.commands.batch.inputs.source import Columns, resolved
from vlmserve.commands.batch.item import Failed, Found, Item
from vlmserve_common.errors import BadRequestError

MOST_BYTES = 512 * 2**20
"""Of a line: a video at the default limit, in base64, and more."""


@dataclass(frozen=True, kw_only=True)
class Lines(ABC):
    """See `Source`. A line that makes no item is told, and the others go on."""

    file: ItemFile
    media: MediaReader

    @abstractmethod
    def item(self, text: bytes, place: str) -> Item:
        """Of a line without spaces around it. place: where it is, as "list.txt:3". Raises BadRequestError."""

    def __iter__(self) -> Iterator[Found]:
        for line in self._lines():
            if isinstance(line, Failed):
                yield line
                continue
            place, text = line
            try:
                yield self.item(text, place)
            except BadRequestError as error:
                code = None if error.code in ("invalid_json", "invalid_item") else error.code
                yield Failed(id=place, message=error.message, code=code or "invalid_line")

    def count(self) -> Iterator[int | None]:
        if self.file.path is None:
            return iter((None,))
        return (1 for line in self._lines() if not isinstance(line, Failed))

    def _lines(self) -> Iterator[tuple[str, bytes] | Failed]:
        """Places and texts of lines that are neither empty nor comments. Where the file cannot be read further, that
        is the last that is told."""
        number = 0
        try:
            with self.file.open() as lines:
                while text := lines.readline(MOST_BYTES + 1):
                    number += 1
                    place = f"{self.file.name}:{number}"
                    if len(text) > MOST_BYTES:
                        while text and not text.endswith(b"\n"):
                            text = lines.readline(2**20)
                        told = f"the line has more than {MOST_BYTES} bytes"
                        yield Failed(id=place, message=told, code="invalid_line")
                        continue
                    stripped = text.removeprefix(b"\xef\xbb\xbf").strip()
                    if stripped and not self._is_comment(stripped):
                        yield place, stripped
        except BROKEN as error:
            yield self.file.broken(error, done=number, what="line")

    def _is_comment(self, text: bytes) -> bool:
        return False


class AddressList(Lines):
    """A path or URL a line; # begins a comment."""

    def item(self, text: bytes, place: str) -> Item:
        return self.media.item(resolved(os.fsdecode(text), self.file.base))

    def _is_comment(self, text: bytes) -> bool:
        return text.startswith(b"#")


@dataclass(frozen=True, kw_only=True)
class JsonLines(Lines):
    """Media with fields, or chat requests."""

    columns: Columns
    request_fields: Collection[str] | None

    def item(self, text: bytes, place: str) -> Item:
        given = json_object(text, "line")
        if is_request(given):
            base, fields = self.file.base, self.request_fields
            return request_item(given, text, place=place, base=base, media=self.media, fields=fields)
        column = media_column((name for name, value in given.items() if value is not None), self.columns.media)
        if column is None:
            wanted = "image, video, path, url ..." if self.columns.media is None else repr(self.columns.media)
            what = "names no medium, and has no messages"
            raise BadRequestError(f"the line {what}; looked for {wanted} (--media-column)")
        columns = replace(self.columns, id=self.columns.id or "id", prompt=self.columns.prompt or "prompt")
        base = self.file.base
        return item_of(given, column, id=place, signature=place, base=base, media=self.media, columns=columns)
