"""Parquet files, read a few rows at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vlmserve.commands.batch.inputs.files import ItemFile
from vlmserve.commands.batch.inputs.media import MediaReader, item_of, media_column
from vlmserve.commands.batch.inputs.source import Columns, reason
from vlmserve.commands.batch.item import Failed, Found
from vlmserve_common.errors import BadRequestError

if TYPE_CHECKING:
    from pyarrow import Array, RecordBatch
    from pyarrow.parquet import ParquetFile

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
