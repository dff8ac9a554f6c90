"""A file for each caption: beside the pictures, or in a folder of their own.

The journal has every caption, on disk, so these files are not waited for: one that is missing or cut off when a later
run passes by is written again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlmserve.caption.item import Item, MediumItem
from vlmserve.caption.journal import Journal
from vlmserve.caption.outputs.base import replace_file
from vlmserve.caption.result import Captioned, as_text, file_name, output_line


class Sidecars:
    """See `Output`. folder: where they go; None: beside the files. suffix: ".txt" for the text, ".json" for all that
    is known. overwrite: files that are there already, of somebody else, are replaced; else their items fail.
    """

    needs_media = False

    def __init__(self, folder: Path | None, *, suffix: str, overwrite: bool) -> None:
        self._folder = folder
        self._suffix = suffix
        self._overwrite = overwrite
        self._journal: Journal | None = None
        self._made: set[Path] = set()

    def discard(self, journal: Journal) -> None:
        """See `Output`."""
        for target in journal.targets():
            Path(target).unlink(missing_ok=True)

    def begin(self, journal: Journal) -> None:
        """See `Output`."""
        self._journal = journal
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)

    def target(self, item: Item) -> str | None:
        """See `Output`."""
        if self._folder is not None:
            return str(self._folder / (file_name(item) + self._suffix))
        if isinstance(item, MediumItem) and item.path is not None:
            return str(item.path.with_name(item.path.stem + self._suffix))
        return None

    def refusal(self, item: Item, target: str | None) -> str | None:
        """See `Output`."""
        assert self._journal is not None
        if target is None:
            return "it is no local file that a caption could be put beside: name an --output"
        owner = self._journal.owner(target)
        if owner is not None and owner != item.id:
            return f"{target} is the caption of {owner}: name an --output that keeps them apart"
        if owner is None and not self._overwrite and Path(target).exists():
            return f"{target} is there already: --overwrite replaces it, --suffix names another one"
        return None

    def write(self, results: Sequence[Captioned]) -> Mapping[str, Any]:
        """See `Output`."""
        for result in results:
            assert result.target is not None
            self._write(Path(result.target), result.record)
        return {"suffix": self._suffix}

    def room(self) -> int | None:
        """See `Output`."""
        return None

    def part(self) -> int | None:
        """See `Output`."""
        return None

    def written(self) -> None:
        """See `Output`."""

    def check(self, item: Item) -> None:
        """See `Output`."""
        assert self._journal is not None
        target = self.target(item)
        record = self._journal.record(item.id)
        if target is None or record is None:
            return
        path = Path(target)
        if not path.exists() or path.stat().st_size != len(self._content(record)):
            self._write(path, record)

    def finish(self) -> None:
        """See `Output`."""

    def close(self) -> None:
        """See `Output`."""

    def _write(self, path: Path, record: Mapping[str, Any]) -> None:
        if self._folder is not None and path.parent not in self._made:
            path.parent.mkdir(parents=True, exist_ok=True)
            if len(self._made) > 10_000:
                self._made.clear()
            self._made.add(path.parent)
        replace_file(path, self._content(record))

    def _content(self, record: Mapping[str, Any]) -> bytes:
        if self._suffix.endswith(".json"):
            return (json.dumps(output_line(record), ensure_ascii=False, indent=1) + "\n").encode("utf-8", "replace")
        return as_text(record).encode("utf-8", "replace")
