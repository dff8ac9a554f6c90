"""WebDataset: tars of media with their captions. Each gets its name when it is complete.

A tar has no index, so an incomplete one (NAME.part) grows like any file, and can be cut to the journal's length. Order
at its end: the end mark is on disk -> the journal names the next part -> the file is renamed. If a run ended before the
renaming, the next run does it.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from processors.formats import file_format
from processors.inputs import Modality
from vlmserve.commands.caption.journal import CaptionJournal
from vlmserve.commands.caption.outputs.base import Appended, Output, OutputError, PartNames, check_own, remove_locked
from vlmserve.commands.caption.result import Captioned, Touched, as_text, output_line
from vlmserve_common.files import flush_folder

_MOST_BYTES = 3 * 2**30
_END = b"\0" * (2 * tarfile.BLOCKSIZE)


class Tars(Output):
    """An output of tars. names: of the parts. items_per_file: samples in a part, which also ends at 3 GiB.

    A sample's key is its number in the output. KEY.txt has the caption, KEY.json the whole record.
    """

    needs_media = True

    def __init__(self, names: PartNames, *, items_per_file: int) -> None:
        self._names = names
        self._items_per_file = items_per_file
        self._file: Appended | None = None
        self._part = self._items = self._total = 0

    def paths(self) -> Sequence[Path]:
        return [self._names.path(0), self._unfinished(0)]

    def discard(self, journal: CaptionJournal) -> None:
        for part in range(journal.state()["part"] + 1 if journal.state() else 0):
            for path in (self._unfinished(part), self._names.path(part)):
                remove_locked(path)

    def begin(self, journal: CaptionJournal) -> None:
        self.journal = journal
        state = journal.state()
        check_own(self._names.path(0), state)
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
    return {"jpeg": "jpg", "tiff": "tif"}.get(found.name.lower(), found.name.lower())
