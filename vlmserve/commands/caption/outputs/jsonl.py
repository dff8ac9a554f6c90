"""Lines of JSON, in the order in which items are finished."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmserve.commands.caption.journal import CaptionJournal
from vlmserve.commands.caption.outputs.base import Appended, Output, check_own, remove_locked
from vlmserve.commands.caption.result import Captioned, output_line


class JsonLinesOutput(Output):
    """An output of lines. A file that was removed is written again from the journal."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Appended | None = None

    def paths(self) -> Sequence[Path]:
        return [self._path]

    def discard(self, journal: CaptionJournal) -> None:
        if journal.state():
            remove_locked(self._path)

    def begin(self, journal: CaptionJournal) -> None:
        state = journal.state()
        check_own(self._path, state)
        anew = bool(state) and not self._path.exists()
        self._file = Appended(self._path, 0 if anew else state.get("bytes", 0))
        if anew:
            for record in journal.records():
                self._file.append(_line(record))
            self._file.sync()
        if anew or not state:  # from here on the journal owns the file
            journal.add((), (), {"bytes": self._file.size})

    def write(self, results: Sequence[Captioned]) -> Mapping[str, Any]:
        assert self._file is not None
        self._file.append(b"".join(_line(result.record) for result in results))
        self._file.sync()
        return {"bytes": self._file.size}

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _line(record: Mapping[str, Any]) -> bytes:
    return json.dumps(output_line(record), ensure_ascii=False).encode("utf-8", "replace") + b"\n"
