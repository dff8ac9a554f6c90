"""Parquet: finished parts, made of the journal's records, each renamed to its name when it is whole.

Order: the part, on disk, under its name -> the journal says which items it holds. After a crash in between the same
part is written again.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vlmserve.caption.journal import Journal
from vlmserve.caption.outputs.base import Output, PartNames, remove_locked, sync_folder
from vlmserve.caption.result import Captioned, output_line, texts

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS_AT_A_TIME = 1000


class Parquet(Output):
    """See `Output`. names: of the parts. items_per_file: rows in a part.

    An output of one file is written anew, from all the records of the journal, at the end of each run.
    """

    def __init__(self, names: PartNames, *, items_per_file: int) -> None:
        self._names = names
        self._items_per_file = items_per_file
        self._journal: Journal | None = None
        self._next_part = self._rows = 0
        self._exported = 0  # records in the one file
        self._changed = False

    def paths(self) -> Sequence[Path]:
        """See `Output`."""
        return [self._names.path(0)]

    def discard(self, journal: Journal) -> None:
        """See `Output`."""
        for part in range(journal.state()["next_part"] + 1 if journal.state() else 0):
            remove_locked(self._names.path(part))

    def begin(self, journal: Journal) -> None:
        """See `Output`."""
        import pyarrow.parquet  # noqa: F401  # before anything is computed

        state = journal.state()
        self._names.check_own(state)
        self._names.path(0).parent.mkdir(parents=True, exist_ok=True)
        self._journal = journal
        self._next_part, self._exported = state.get("next_part", 0), state.get("exported", 0)
        if self._names.many:
            self._rows = len(journal.left_over(self._items_per_file))
        else:
            self._changed = journal.counts()[0] != self._exported or not self._names.path(0).exists()

    def write(self, results: Sequence[Captioned]) -> Mapping[str, Any]:
        """Nothing yet: the journal keeps them until a part is full."""
        self._rows += len(results)
        self._changed = True
        return self._state()

    def written(self, results: Sequence[Captioned]) -> Sequence[tuple[Captioned, str]]:
        """See `Output`."""
        while self._names.many and self._rows >= self._items_per_file:
            self._end_part()
        return ()

    def finish(self) -> None:
        """See `Output`."""
        assert self._journal is not None
        if self._names.many:
            while self._rows:
                self._end_part()
        elif self._changed:
            _write(self._names.path(0), _chunks(self._journal.records()))
            self._exported, self._changed = self._journal.counts()[0], False
            self._journal.add((), (), self._state())

    def _end_part(self) -> None:
        assert self._journal is not None
        rows = self._journal.left_over(self._items_per_file)
        if rows:
            _write(self._names.path(self._next_part), _chunks(record for _, record in rows))
            self._next_part += 1
            self._journal.set_part(rows[-1][0], self._next_part - 1, self._state())
        self._rows = max(0, self._rows - len(rows)) if rows else 0

    def _state(self) -> dict[str, int]:
        return {"next_part": self._next_part, "exported": self._exported}


def _schema() -> pa.Schema:
    import pyarrow as pa

    return pa.schema(
        [
            ("id", pa.string()),
            ("caption", pa.string()),
            ("captions", pa.list_(pa.string())),
            ("model", pa.string()),
            ("finish_reason", pa.string()),
            ("prompt_tokens", pa.int64()),
            ("completion_tokens", pa.int64()),
            ("prompt", pa.string()),
            ("blake3", pa.string()),
            ("fields", pa.string()),
        ]
    )


def _row(record: Mapping[str, Any]) -> dict[str, Any]:
    """fields: as JSON, for files of one schema cannot hold what each source brings."""
    plain = output_line({name: value for name, value in record.items() if name != "custom_id"})
    finish = plain.get("finish_reason")
    return {
        **plain,
        "captions": texts(record),
        "finish_reason": ",".join(map(str, finish)) if isinstance(finish, list) else finish,
        "fields": json.dumps(record["fields"], ensure_ascii=False) if "fields" in record else None,
    }


def _chunks(records: Iterator[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    chunk: list[dict[str, Any]] = []
    for record in records:
        chunk.append(_row(record))
        if len(chunk) == _ROWS_AT_A_TIME:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _write(path: Path, chunks: Iterator[list[dict[str, Any]]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    unfinished = path.with_name(f"{path.name}.part")
    schema = _schema()
    try:
        with pq.ParquetWriter(unfinished, schema, compression="zstd") as writer:
            for chunk in chunks:
                writer.write_table(pa.Table.from_pylist(chunk, schema=schema))
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    sync_folder(path.parent)
