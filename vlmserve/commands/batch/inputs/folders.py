"""Local folders. No list of them is kept: of a million files, a few thousand are known at a time."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from vlmserve.commands.batch.inputs.media import MediaReader
from vlmserve.commands.batch.inputs.source import printable
from vlmserve.commands.batch.inputs.trees import Entry, Tree
from vlmserve.commands.batch.item import Failed, MediumItem

_SORTED = 4096
"""The entries of a folder come in order if it has no more than these."""


class LocalTree(Tree):
    """See `Tree`."""

    def __init__(self, media: MediaReader, passed_over: frozenset[str] = frozenset()) -> None:
        self._media = media
        self.passed_over = passed_over

    def scan(self, folder: str) -> Iterator[Entry | Failed]:
        try:
            with os.scandir(folder or os.curdir) as entries:
                first = sorted(itertools.islice(entries, _SORTED), key=lambda entry: entry.name)
                for entry in itertools.chain(first, entries):
                    yield Entry(
                        path=os.path.join(folder, entry.name),
                        name=entry.name,
                        is_folder=_holds(entry.is_dir),
                        is_link=entry.is_symlink(),
                        is_local_file=_holds(entry.is_file),
                    )
        except OSError as error:
            yield Failed(id=printable(folder), message=f"cannot read the folder: {error.strerror}")

    def is_folder(self, path: str) -> bool:
        return os.path.isdir(path or os.curdir)

    def item(self, entry: Entry, root: str) -> MediumItem:
        return self._media.item(entry.path, root=Path(root))

    def identity(self, folder: str) -> tuple[int, int] | None:
        try:
            status = os.stat(folder or os.curdir)
        except OSError:
            return None
        return status.st_dev, status.st_ino


def _holds(question: Callable[[], bool]) -> bool:
    try:
        return question()
    except OSError:  # a link to itself, say
        return False
