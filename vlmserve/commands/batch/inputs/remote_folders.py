"""Folders elsewhere, by fsspec. The names of one folder are in memory at a time: drivers give all at once."""

from __future__ import annotations

import glob
import posixpath
from collections.abc import Iterator
from typing import Any

from processors.inputs import Modality
from vlmserve.commands.batch.inputs.media import MediaReader, Own
from vlmserve.commands.batch.inputs.remote import read_path, signature
from vlmserve.commands.batch.inputs.source import printable, reason
from vlmserve.commands.batch.inputs.trees import Entry, Tree, fixed_part
from vlmserve.commands.batch.item import Failed, MediumItem


class RemoteTree(Tree):
    """See `Tree`. word: a file, folder or pattern, as the user wrote it, whose path in the file system is `path`."""

    def __init__(self, word: str, system: Any, path: str, media: MediaReader) -> None:
        self._word = word
        self._system = system
        self._path = path
        self._media = media

    def scan(self, folder: str) -> Iterator[Entry | Failed]:
        try:
            entries = sorted(self._system.ls(folder, detail=True), key=lambda entry: str(entry["name"]))
        except Exception as error:  # whatever a driver raises
            message = f"cannot read the folder: {reason(error)}"
            yield Failed(id=printable(self.address(folder)), message=message)
            return
        for info in entries:
            name = info["name"].strip("/")
            if name != folder.strip("/"):  # which some stores list, too
                is_folder = info["type"] == "directory"
                yield Entry(path=info["name"], name=posixpath.basename(name), is_folder=is_folder, info=info)

    def is_folder(self, path: str) -> bool:
        return bool(self._system.isdir(path))

    def item(self, entry: Entry, root: str) -> MediumItem:
        address = self.address(entry.path)
        return self._media.held(
            lambda: read_path(self._system, entry.path, address, self._media.fetcher.settings.limit(Modality.VIDEO)),
            Own(id=printable(address)),
            signature=signature(entry.info),
            size=entry.info.get("size") or 0,
            name=entry.path,
        )

    def address(self, path: str) -> str:
        """The URL of a file or folder, beginning as the word does."""
        if path.strip("/") == self._path.strip("/"):
            return self._word
        first, chain, rest = self._word.partition("::")
        scheme, _, written = first.partition("://")
        folder = fixed_part(written) if glob.has_magic(written) else written.rstrip("/")
        below = path.strip("/").removeprefix(fixed_part(self._path).strip("/")).strip("/")
        return f"{scheme}://{folder}{'/' if folder else ''}{below}{chain}{rest}"
