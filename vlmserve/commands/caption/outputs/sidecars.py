"""One file per caption: beside the pictures, or in a folder.

The journal has every caption on disk before its file is written. So each file has a known owner whatever ends a run. A
later run writes missing and empty files again, and leaves files that the user has changed.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmserve.commands.batch.item import Item, MediumItem
from vlmserve.commands.caption.journal import CaptionJournal
from vlmserve.commands.caption.outputs.base import Output
from vlmserve.commands.caption.prompts import PROMPT_FILE
from vlmserve.commands.caption.result import Captioned, Touched, as_text, file_name, output_line
from vlmserve_common.files import replacing

_NO_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


class Sidecars(Output):
    """An output of caption files. folder: their place; None puts them beside the pictures.

    suffix: ".txt" for the text, ".json" for the whole record. overwrite: replace files of other origin; otherwise
    their items fail.
    """

    by_path = True

    def __init__(self, folder: Path | None, *, suffix: str, overwrite: bool) -> None:
        self._folder = None if folder is None else Path(os.path.abspath(folder))
        self._suffix = suffix
        self._overwrite = overwrite

    def paths(self) -> Sequence[Path]:
        return ()

    def discard(self, journal: CaptionJournal) -> None:
        for target in journal.targets():
            Path(target).unlink(missing_ok=True)

    def begin(self, journal: CaptionJournal) -> None:
        self.journal = journal
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)

    def target(self, item: Item) -> str | None:
        if self._folder is not None:
            return str(self._folder / (file_name(item) + self._suffix))
        if isinstance(item, MediumItem) and item.path is not None:
            path = Path(os.path.abspath(item.path))
            return str(path.with_name(path.stem + self._suffix))
        return None

    def refusal(self, item: Item, target: str | None) -> str | None:
        if target is None:
            return "it is no local file that a caption could be put beside: name an --output"
        if Path(target).name == PROMPT_FILE:
            return f"its caption would be {target}, which is what a folder is asked: --caption-suffix names another one"
        owner = self.journal.owner(target)
        if owner is not None and owner != item.id:
            return f"{target} is the caption of {owner}: name an --output that keeps them apart"
        if owner is None and not self._overwrite and os.path.lexists(target):
            return f"{target} is there already: --overwrite replaces it, --caption-suffix names another one"
        return None

    def write(self, results: Sequence[Captioned]) -> Mapping[str, Any]:
        """Write nothing yet: the journal comes first."""
        return {"suffix": self._suffix}

    def written(self, results: Sequence[Captioned]) -> Sequence[Touched]:
        written = [
            Touched(task=result.task, trouble=self._write(Path(str(result.task.target)), result.record))
            for result in results
        ]
        return [each for each in written if each.trouble]

    def check(self, item: Item) -> str | None:
        target = self.target(item)
        if target is None:
            return None
        path = Path(target)
        if path.exists() and path.stat().st_size:
            return None
        record = self.journal.record(item.id)
        return None if record is None else self._write(path, record)

    def _write(self, path: Path, record: Mapping[str, Any]) -> str | None:
        """Write a file. Returns the reason if that fails; OSError if nothing can be written any more."""
        try:
            if self._folder is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path, on_disk=False) as unfinished:
                unfinished.write_bytes(self._content(record))
        except OSError as error:
            if error.errno in _NO_DISK:
                raise
            return f"its caption cannot be written to {path}: {error.strerror}"
        return None

    def _content(self, record: Mapping[str, Any]) -> bytes:
        if self._suffix.endswith(".json"):
            return (json.dumps(output_line(record), ensure_ascii=False, indent=1) + "\n").encode("utf-8", "replace")
        return as_text(record).encode("utf-8", "replace")
