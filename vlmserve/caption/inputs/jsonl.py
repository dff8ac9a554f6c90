"""Files with an object of JSON a line: media with fields, or chat requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from vlmserve.caption.inputs.chats import batch_item, chat_item, is_batch_form
from vlmserve.caption.inputs.files import ItemFile
from vlmserve.caption.inputs.lines import Line, place_of, read_lines, too_long
from vlmserve.caption.inputs.media import MediaReader
from vlmserve.caption.inputs.records import item_of, media_column
from vlmserve.caption.inputs.source import Columns, printable
from vlmserve.caption.item import Found, Unreadable
from vlmserve.server.body import json_object
from vlmserve_common.errors import BadRequestError


@dataclass(frozen=True, kw_only=True)
class JsonLines:
    """See `Source`."""

    file: ItemFile
    media: MediaReader
    columns: Columns

    def __iter__(self) -> Iterator[Found]:
        for line in read_lines(self.file):
            if isinstance(line, Unreadable):
                yield line
            elif line.text is None:
                yield too_long(self.file, line.number)
            else:
                yield self._found(line.number, line.text)

    def count(self) -> Iterator[int | None]:
        """See `Source`."""
        if self.file.path is None:
            return iter((None,))
        return (1 for line in read_lines(self.file) if isinstance(line, Line))

    def _found(self, number: int, text: bytes) -> Found:
        place = place_of(self.file, number)
        try:
            given = json_object(text, "line")
            if is_batch_form(given):
                return batch_item(given, text, base=self.file.base, media=self.media)
            if "messages" in given:
                id = given.pop("id", None)
                id = place if id in (None, "") else printable(str(id))
                return chat_item(given, text, id=id, base=self.file.base, media=self.media)
            column = media_column((name for name, value in given.items() if value is not None), self.columns.media)
            if column is None:
                wanted = "image, video, path, url ..." if self.columns.media is None else repr(self.columns.media)
                what = "names no medium, and has no messages"
                raise BadRequestError(f"the line {what}; looked for {wanted} (--media-column)")
            columns = replace(self.columns, id=self.columns.id or "id", prompt=self.columns.prompt or "prompt")
            return item_of(
                given,
                column,
                id=place,
                signature=place,
                base=self.file.base,
                media=self.media,
                columns=columns,
            )
        except BadRequestError as error:
            code = "invalid_line" if error.code in (None, "invalid_json", "invalid_item") else error.code
            return Unreadable(id=place, message=error.message, code=code or "invalid_line")
