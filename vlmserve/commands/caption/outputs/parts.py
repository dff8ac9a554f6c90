"""Outputs in parts, each of which gets its name when it is complete: parquet, and WebDataset's tars.

A parquet part is made of the journal's records. It is on disk under its name -> the journal assigns its items to it.
After a crash in between, the same part is written again.

A tar has no index, so an incomplete one (NAME.part) grows like any file, and can be cut to the journal's length. Order
at its end: the end mark is on disk -> the journal names the next part -> the file is renamed. If a run ended before the
renaming, the next run does it.
"""

from __future__ import annotations

import itertools
import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from processors.formats import file_format
from processors.inputs import Modality
from vlmserve.commands.batch.inputs.files import need
from vlmserve.commands.caption.journal import CaptionJournal
from vlmserve.commands.caption.outputs.base import Appended, Output, OutputError, PartNames, check_own, remove_locked
from vlmserve.commands.caption.result import Captioned, Touched, as_text, output_line, texts
from vlmserve_common.files import flush_folder, replacing

if TYPE_CHECKING:
    import pyarrow as pa

_ROWS_AT_A_TIME = 1000
_COLUMNS = (
    *("id", "caption", "captions", "model", "finish_reason"),
    *("prompt_tokens", "completion_tokens", "prompt", "blake3", "fields"),
)


class Whole(Output):
    """An output of files that are written whole. names: of the parts. items_per_file: items in a part.

    A single file is written again at the end of each run, from all records of the journal.
    """

    def __init__(self, names: PartNames, *, items_per_file: int) -> None:
        self._names = names
        self._items_per_file = items_per_file
        self._next_part = 0
        self._rows = 0  # in no part yet; fewer than there are, if a run was killed with more than a part
        self._exported = 0  # records in the one file
        self._changed = False

    def write_part(self, path: Path, records: Iterator[dict[str, Any]], count: int) -> None:
        """Write a file of so many records. It is on disk, and complete, when this returns."""
        raise NotImplementedError

    def paths(self, others: Sequence[Path]) -> Sequence[Path]:
        return [self._names.path(0), *(self._names.among(others) if self._names.many else ())]

    def discard(self, journal: CaptionJournal) -> None:
        for part in range(journal.state()["next_part"] + 1 if journal.state() else 0):
            remove_locked(self._names.path(part))

    def begin(self, journal: CaptionJournal) -> None:
        state = journal.state()
        if self._names.many:
            self._names.check_own(state)
        else:
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
            self.write_part(self._names.path(0), self.journal.records(), self.journal.count())
            self._exported, self._changed = self.journal.count(), False
            self.journal.add((), (), self._state())

    def _end_part(self) -> bool:
        """Write the next part. Returns False if the journal has no items for it."""
        rows = self.journal.left_over(self._items_per_file)
        if rows:
            self.write_part(self._names.path(self._next_part), (record for _, record in rows), len(rows))
            self._next_part += 1
            self.journal.set_part(rows[-1][0], self._next_part - 1, self._state())
        self._rows = max(0, self._rows - len(rows))
        return bool(rows)

    def _state(self) -> dict[str, int]:
        return {"next_part": self._next_part, "exported": self._exported}


class Parquet(Whole):
    """An output of parquet files. schema, row: what a row is, for captions by default."""

    def __init__(self, names: PartNames, *, items_per_file: int) -> None:
        need(f"--output {str(names.path(0))!r}", "pyarrow")
        super().__init__(names, items_per_file=items_per_file)

    def schema(self, first: Mapping[str, Any] | None) -> pa.Schema:
        """Return the schema of rows. first: the first row, if there is one."""
        import pyarrow as pa

        kinds = {"captions": pa.list_(pa.string()), "prompt_tokens": pa.int64(), "completion_tokens": pa.int64()}
        return pa.schema([(name, kinds.get(name, pa.string())) for name in _COLUMNS])

    def row(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row of a record."""
        return _row(record)

    def write_part(self, path: Path, records: Iterator[dict[str, Any]], count: int) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows: Iterator[dict[str, Any]] = map(self.row, records)
        first = next(rows, None)
        schema = self.schema(first)
        rows = itertools.chain([] if first is None else [first], rows)
        with (
            replacing(path, on_disk=True) as unfinished,
            pq.ParquetWriter(unfinished, schema, compression="zstd") as writer,
        ):
            while chunk := list(itertools.islice(rows, _ROWS_AT_A_TIME)):
                writer.write_table(pa.Table.from_pylist(chunk, schema=schema))


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


_MOST_BYTES = 3 * 2**30
_END = b"\0" * (2 * tarfile.BLOCKSIZE)


class Tars(Output):
    """An output of tars. names: of the parts. items_per_file: samples in a part, which also ends at 3 GiB.

    A sample's key is its number in the output. KEY.txt has the caption, KEY.json the whole record.
    """

    def __init__(self, names: PartNames, *, items_per_file: int) -> None:
        self._names = names
        self._items_per_file = items_per_file
        self._file: Appended | None = None
        self._part = self._items = self._total = 0

    def paths(self, others: Sequence[Path]) -> Sequence[Path]:
        return [self._names.path(0), self._unfinished(0), *self._names.among(others)]

    def discard(self, journal: CaptionJournal) -> None:
        for part in range(journal.state()["part"] + 1 if journal.state() else 0):
            for path in (self._unfinished(part), self._names.path(part)):
                remove_locked(path)

    def begin(self, journal: CaptionJournal) -> None:
        self.journal = journal
        state = journal.state()
        self._names.check_own(state)
        self._part, self._items, self._total = (state.get(name, 0) for name in ("part", "items", "total"))
        if self._part and self._unfinished(self._part - 1).exists():
            self._rename(self._part - 1)
        path = self._unfinished(self._part)
        if state.get("bytes") and not path.exists():
            raise OutputError(
                f"{path} is gone, which holds the last {self._items} finished items: put it back, or --restart"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = Appended(path, state.get("bytes", 0))
        if not state:  # from here on the journal owns the parts
            journal.add((), (), self._state())

    def write(self, results: Sequence[Captioned]) -> Mapping[str, Any]:
        assert self._file is not None
        for number, result in enumerate(results, self._total):
            for data in _sample(f"{number:09d}", result):
                self._file.append(data)
        self._file.sync()
        self._items += len(results)
        self._total += len(results)
        return self._state()

    def room(self) -> int | None:
        return self._items_per_file - self._items

    def written(self, results: Sequence[Captioned]) -> Sequence[Touched]:
        assert self._file is not None
        if self._items >= self._items_per_file or self._file.size >= _MOST_BYTES:
            self._end_part()
        return ()

    def finish(self) -> None:
        """Complete the current part, even if it is not full."""
        if self._items:
            self._end_part()

    def close(self) -> None:
        if self._file is None:
            return
        self._file.close()
        path = self._unfinished(self._part)
        if not self._items and path.exists() and not path.stat().st_size:
            path.unlink()
        self._file = None

    def _end_part(self) -> None:
        assert self._file is not None
        self._file.append(_END)
        self._file.append(b"\0" * (-self._file.size % tarfile.RECORDSIZE))
        self._file.sync()
        self._file.close()
        self._file = None
        self._part, self._items = self._part + 1, 0
        self.journal.add((), (), {**self._state(), "bytes": 0})
        self._rename(self._part - 1)
        self._file = Appended(self._unfinished(self._part), 0)

    def _state(self) -> dict[str, Any]:
        size = 0 if self._file is None else self._file.size
        return {"part": self._part, "items": self._items, "total": self._total, "bytes": size}

    def _unfinished(self, part: int) -> Path:
        path = self._names.path(part)
        return path.with_name(f"{path.name}.part")

    def _rename(self, part: int) -> None:
        self._unfinished(part).replace(self._names.path(part))
        flush_folder(self._names.path(part).parent)


def _sample(key: str, result: Captioned) -> Iterator[bytes]:
    if result.data is not None:
        yield from _member(f"{key}.{_suffix(result.data, result.modality)}", result.data)
    yield from _member(f"{key}.txt", as_text(result.record).encode("utf-8", "replace"))
    line = json.dumps(output_line(result.record), ensure_ascii=False)
    yield from _member(f"{key}.json", line.encode("utf-8", "replace"))


def _member(name: str, data: bytes) -> Iterator[bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    yield info.tobuf(tarfile.USTAR_FORMAT)
    yield data
    yield b"\0" * (-len(data) % tarfile.BLOCKSIZE)


def _suffix(data: bytes, modality: Modality | None) -> str:
    found = file_format(data)
    assert found is not None  # it has been decoded
    if modality is Modality.VIDEO:
        return {"matroska": "mkv", "gif": "gif"}.get(found.ffmpeg or "", "mp4")
    if modality is Modality.AUDIO:
        return {"mov": "m4a"}.get(found.ffmpeg or "", found.ffmpeg or "wav")
    return {"jpeg": "jpg", "tiff": "tif"}.get(found.name.lower(), found.name.lower())
