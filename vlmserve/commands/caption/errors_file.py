"""The file of failed items, one line of JSON each, for people and programs."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TextIO

from vlmserve.commands.batch.item import Failed
from vlmserve.config.checks import SettingsError
from vlmserve_common.files import replacing

logger = logging.getLogger("vlmserve.caption")

_MOST_LOGGED = 20
_MOST_LINE_BYTES = 1 << 20
_FIELDS = {"id", "message", "code"}


class ErrorsFile:
    """Holds the failures that still stand. It is made of the journal's failures when a run begins and ends.

    In between, failures are appended. path: None logs the first few instead. A pipe or device is only appended to.
    Raises SettingsError for a file with other content, OSError for one that cannot be written.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = None if path is None else path.resolve()  # a link's target is replaced, not the link
        self._file: TextIO | None = None
        self._logged = 0
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._check_own(self._path)
        self._path.open("a").close()

    def begin(self, standing: Iterable[Failed]) -> None:
        """Open the file with these failures. OSError."""
        if self._path is not None:
            self.write_anew(standing)
            self._file = self._path.open("a", encoding="utf-8", errors="replace")

    def write_anew(self, standing: Iterable[Failed]) -> None:
        """Replace the content by these failures."""
        if self._path is None or not self._path.is_file():
            return
        with (
            replacing(self._path, on_disk=True) as unfinished,
            unfinished.open("w", encoding="utf-8", errors="replace") as file,
        ):
            file.writelines(map(_line, standing))

    def _check_own(self, path: Path) -> None:
        if not path.is_file() or not path.stat().st_size:
            return
        with path.open("rb") as file:
            first = file.readline(_MOST_LINE_BYTES)
        try:
            ours = set(json.loads(first)) == _FIELDS
        except (ValueError, TypeError):
            ours = False
        if not ours:
            raise SettingsError(f"--errors is {str(path)!r}, which holds something else: name another file")

    def add(self, failed: Sequence[Failed]) -> None:
        """Append new failures."""
        for failure in failed if self._file is None else ():
            self._logged += 1
            if self._logged <= _MOST_LOGGED:
                logger.error("%s: %s", failure.id, failure.message)
            if self._logged == _MOST_LOGGED:
                logger.error("further failures are only counted: --errors FILE has them all")
        if self._file is not None and failed:
            self._file.writelines(map(_line, failed))
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _line(failure: Failed) -> str:
    line = {"id": failure.id, "message": failure.message, "code": failure.code}
    return json.dumps(line, ensure_ascii=False) + "\n"
