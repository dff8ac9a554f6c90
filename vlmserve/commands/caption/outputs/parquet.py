"""Parquet: complete parts, made of the journal's records. Each gets its name when it is complete.

Order: the part is on disk under its name -> the journal assigns its items to it. After a crash in between, the same
part is written again.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmserve.commands.caption.journal import CaptionJournal
from vlmserve.commands.caption.outputs.base import Output, PartNames, check_own, remove_locked
from vlmserve.commands.caption.result import Captioned, Touched, output_line, texts
from vlmserve_common.files import replacing

_ROWS_AT_A_TIME = 1000
_COLUMNS = (
    *("id", "caption", "captions", "model", "finish_reason"),
    *("prompt_tokens", "completion_tokens", "prompt", "blake3", "fields"),
)


class Parquet(Output):
    """An output of parquet files. names: of the parts. items_per_file: rows in a part.

    A single file is written again at the end of each run, from all records of the journal.
    """

    def __init__(self, names: PartNames, *, items_per_file: int) -> None:
        self._names = names
        self._items_per_file = items_per_file
        self._next_part = 0
        self._rows = 0  # in no part yet; fewer than there are, if a run was killed with more than a part
        self._exported = 0  # records in the one file
        self._changed = False

    def paths(self) -> Sequence[Path]:
        return [self._names.path(0)]

    def discard(self, journal: CaptionJournal) -> None:
        for part in range(journal.state()["next_part"] + 1 if journal.state() else 0):
            remove_locked(self._names.path(part))

    def begin(self, journal: CaptionJournal) -> None:
        import pyarrow.parquet  # noqa: F401  # before anything is computed

        state = journal.state()
        check_own(self._names.path(0), state)
        self._names.path(0).parent.mkdir(parents=True, exist_ok=True)
        self.journal = journal
        self._next_part, self._exported = state.get("next_part", 0), state.get("exported", 0)
        if self._names.many:
            self._rows = len(journal.left_over(self._items_per_file))
        else:
            self._changed = journal.count() != self._exported or not self._names.path(0).exists()

    def write(self, results: Sequence[Captioned]) -> Mapping[str, Any]:
        """Write nothing yet: the journal keeps the results until a part is full."""
        self._rows += len(results)
        self._changed = True
        return self._state()

    def written(self, results: Sequence[Captioned]) -> Sequence[Touched]:
        while self._names.many and self._rows >= self._items_per_file:
            self._end_part()
        return ()

    def finish(self) -> None:
        if self._names.many:
            while self._end_part():
                pass
        elif self._changed:
            _write(self._names.path(0), self.journal.records())
            self._exported, self._changed = self.journal.count(), False
            self.journal.add((), (), self._state())

    def _end_part(self) -> bool:
        """Write the next part. Returns False if the journal has no items for it."""
        rows = self.journal.left_over(self._items_per_file)
        if rows:
            _write(self._names.path(self._next_part), (record for _, record in rows))
            self._next_part += 1
            self.journal.set_part(rows[-1][0], self._next_part - 1, self._state())
        self._rows = max(0, self._rows - len(rows))
        return bool(rows)

    def _state(self) -> dict[str, int]:
        return {"next_part": self._next_part, "exported": self._exported}


def _row(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a record. Its fields are JSON text, since all rows have one schema."""
    plain = output_line({name: value for name, value in record.items() if name != "custom_id"})
    finish = plain.get("finish_reason")
    return {
        **plain,
        "captions": texts(record),
        "finish_reason": ",".join(map(str, finish)) if isinstance(finish, list) else finish,
        "fields": json.dumps(record["fields"], ensure_ascii=False) if "fields" in record else None,
    }


def _write(path: Path, records: Iterator[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {"captions": pa.list_(pa.string()), "prompt_tokens": pa.int64(), "completion_tokens": pa.int64()}
    schema = pa.schema([(name, kinds.get(name, pa.string())) for name in _COLUMNS])
    rows = map(_row, records)
    with (
        replacing(path, on_disk=True) as unfinished,
        pq.ParquetWriter(unfinished, schema, compression="zstd") as writer,
    ):
        while chunk := list(itertools.islice(rows, _ROWS_AT_A_TIME)):
            writer.write_table(pa.Table.from_pylist(chunk, schema=schema))
