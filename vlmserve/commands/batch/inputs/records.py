"""Files of records: lines with a path, an object of JSON or a chat request each, and parquet files."""

from __future__ import annotations

import contextlib
import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import blake3

from processors.inputs import Modality
from vlmserve.commands.batch.inputs.files import (
    BROKEN,
    Columns,
    ItemFile,
    MediaReader,
    item_of,
    media_column,
    printable,
    reason,
    resolved,
)
from vlmserve.commands.batch.item import ChatRequest, Failed, Found, Item, MediumItem, RequestItem
from vlmserve.commands.client.media import with_addresses
from vlmserve.frontend.openai.json_bodies import checked, json_object
from vlmserve.frontend.openai.protocol import ChatCompletionRequest
from vlmserve_common.errors import BadRequestError

if TYPE_CHECKING:
    from pyarrow import Array, RecordBatch
    from pyarrow.parquet import ParquetFile

MOST_BYTES = 512 * 2**20
"""Longest line. A video of the default limit fits in base64."""

_BATCH = {"method": "POST", "url": "/v1/chat/completions"}
# A line does not choose how its answer is delivered.
_NOT_OPTIONS = ("model", "messages", "stream", "stream_options")


def is_request(given: Mapping[str, Any]) -> bool:
    """Return True for a chat request, plain or in OpenAI's batch form."""
    return "messages" in given or _is_batch(given)


def request_item(
    given: dict[str, Any], text: bytes, *, place: str, base: str, media: MediaReader, fields: Collection[str] | None
) -> RequestItem:
    """Make the item of a line. fields: see `open_inputs`. Raises BadRequestError if the line has no usable id.

    Other mistakes are raised when the item is read, as for files.
    """
    is_batch = _is_batch(given)
    id = given["custom_id"] if is_batch else given.pop("id", None)
    if is_batch and (not isinstance(id, str) or not id):
        raise BadRequestError(f"custom_id is {id!r}; it must be text", code="invalid_line")
    digest, size = blake3.blake3(text), len(text)
    problem: BadRequestError | None = None
    contents: dict[tuple[str, Modality], MediumItem] = {}

    def open_file(address: str, modality: Modality) -> None:
        contents[address, modality] = media.open(resolved(address, base), modality)

    try:
        body = _batch_body(given) if is_batch else given
        if fields is not None:
            body = {name: body[name] for name in fields if name in body}
        messages, options = _checked(body)
        with_addresses(messages, open_file)
    except BadRequestError as error:
        problem = error
    for content in contents.values():
        digest.update(b"\0" + (content.signature or "").encode("utf-8", "surrogateescape"))
        size += content.size

    def read() -> ChatRequest:
        if problem is not None:
            raise problem
        read_file = functools.cache(lambda address, modality: contents[address, modality].read())
        return ChatRequest(messages=with_addresses(messages, read_file), options=options, model=body.get("model"))

    id = place if id in (None, "") else printable(str(id))
    return RequestItem(id=id, signature=digest.hexdigest(), size=size, read=read, is_batch=is_batch)


def _is_batch(given: Mapping[str, Any]) -> bool:
    return "body" in given and "custom_id" in given


def _batch_body(given: Mapping[str, Any]) -> Mapping[str, Any]:
    for name, wanted in _BATCH.items():
        if given.get(name, wanted) != wanted:
            raise BadRequestError(f"{name} is {given[name]!r}; it must be {wanted!r}", param=name)
    if not isinstance(given["body"], dict):
        raise BadRequestError("body must be an object", param="body", code="invalid_type")
    return given["body"]


def _checked(body: Mapping[str, Any]) -> tuple[Sequence[Mapping[str, Any]], dict[str, Any]]:
    if body.get("stream_options") is not None and not body.get("stream"):
        raise BadRequestError("stream_options needs stream: true", param="stream_options", code="invalid_value")
    checked(dict(body), ChatCompletionRequest)
    return body["messages"], {name: value for name, value in body.items() if name not in _NOT_OPTIONS}


@dataclass(frozen=True, kw_only=True)
class Lines(ABC):
    """A `Source` of lines. A line that makes no item is reported, and the next ones follow."""

    file: ItemFile
    media: MediaReader

    @abstractmethod
    def item(self, text: bytes, place: str) -> Item:
        """Make the item of a stripped line. place: such as "list.txt:3". Raises BadRequestError."""

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
        """Yield places and texts of lines that are neither empty nor comments. An error of reading comes last."""
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
    """Lines with a path or URL each; # begins a comment."""

    def item(self, text: bytes, place: str) -> Item:
        return self.media.item(resolved(os.fsdecode(text), self.file.base))

    def _is_comment(self, text: bytes) -> bool:
        return text.startswith(b"#")


@dataclass(frozen=True, kw_only=True)
class JsonLines(Lines):
    """Lines with an object each: a medium with fields, or a chat request."""

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


_ROWS = 16
# Column chunks are read in pieces of this size; otherwise a whole row group's pictures would be in memory.
_BUFFER_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class Table:
    """A `Source` of a table's rows. Ids are like file.parquet#12, counted from 0: values of columns may repeat."""

    file: ItemFile
    media: MediaReader
    columns: Columns

    def __iter__(self) -> Iterator[Found]:
        from pyarrow import ArrowException

        row = 0
        try:
            signature = self.file.signature()
            with self._open() as table:
                column = self._column(table)
                for group in range(table.num_row_groups):
                    row, rows = row + table.metadata.row_group(group).num_rows, row
                    yield from self._rows(table, group, rows, row, column, signature)
        except (ArrowException, OSError) as error:
            yield Failed(id=self.file.name, message=f"cannot read it: {reason(error)}")
        except BadRequestError as error:
            yield Failed(id=self.file.name, message=error.message, code="no_media_column")

    def count(self) -> Iterator[int | None]:
        from pyarrow import ArrowException

        if self.file.path is None:
            yield None
            return
        with contextlib.suppress(ArrowException, OSError), self._open() as table:
            yield table.metadata.num_rows

    def names(self) -> Sequence[str] | None:
        """Return the names of the columns; None if they cannot be read, or not twice."""
        from pyarrow import ArrowException

        if self.file.stream is not None:
            return None
        with contextlib.suppress(ArrowException, OSError, BadRequestError), self._open() as table:
            return table.schema_arrow.names
        return None

    @contextlib.contextmanager
    def _open(self) -> Iterator[ParquetFile]:
        from pyarrow.parquet import ParquetFile

        with self.file.open() as file, ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False) as table:
            yield table

    def _column(self, table: ParquetFile) -> str:
        names = table.schema_arrow.names
        column = media_column(names, self.columns.media)
        if column is None:
            raise BadRequestError(
                f"no column of pictures or videos is known among {', '.join(names)}: name it with --media-column"
            )
        return column

    def _rows(self, table: ParquetFile, group: int, row: int, end: int, column: str, signature: str) -> Iterator[Found]:
        from pyarrow import ArrowException

        try:
            for batch in table.iter_batches(batch_size=_ROWS, row_groups=[group], use_threads=False):
                for record in _records(batch):
                    yield self._found(record, row, column, signature)
                    row += 1
        except (ArrowException, OSError) as error:
            told = f"cannot read it: {reason(error)}; {end - row} rows are passed over"
            yield Failed(id=f"{self.file.name}#{row}", message=told)

    def _found(self, record: dict[str, Any], row: int, column: str, signature: str) -> Found:
        id, base = f"{self.file.name}#{row}", self.file.base
        told = f"{signature} {row}"
        try:
            return item_of(record, column, id=id, signature=told, base=base, media=self.media, columns=self.columns)
        except BadRequestError as error:
            return Failed(id=id, message=error.message, code=error.code or "invalid_item")


def _records(batch: RecordBatch) -> Iterator[dict[str, Any]]:
    for row in zip(*map(_values, batch.columns), strict=True):
        yield dict(zip(batch.schema.names, row, strict=True))


def _values(column: Array) -> list[Any]:
    """Convert to Python. None stands for values it cannot hold: text that is not UTF-8, dates outside its calendar."""
    try:
        return column.to_pylist()
    except (ValueError, OverflowError):
        if len(column) == 1:
            return [None]
        return [value for place in range(len(column)) for value in _values(column[place : place + 1])]
