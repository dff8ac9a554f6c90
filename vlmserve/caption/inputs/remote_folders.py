"""Pictures and videos in folders elsewhere, and those that a pattern stands for: found folder by folder."""

from __future__ import annotations

import glob
import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from processors.inputs import Modality
from vlmserve.caption.inputs.media import MediaReader
from vlmserve.caption.inputs.remote import read_path, reason, signature
from vlmserve.caption.inputs.source import name_fields, printable
from vlmserve.caption.item import Found, MediumItem, Unreadable
from vlmserve.client.chat_files import modality_within_limit
from vlmserve.client.media_names import PICTURES, VIDEOS


@dataclass(frozen=True, kw_only=True)
class RemoteFiles:
    """See `Source`. word: a file, a folder or a pattern, as the user wrote it, whose path in the file system is `path`.
    The names of one folder are in memory at a time: drivers give all at once."""

    word: str
    system: Any
    path: str
    media: MediaReader

    def __iter__(self) -> Iterator[Found]:
        for found in self._infos():
            yield found if isinstance(found, Unreadable) else self._item(found)

    def count(self) -> Iterator[int | None]:
        """See `Source`."""
        yield None

    def addresses(self) -> Iterator[str | Unreadable]:
        """The files themselves, as URLs."""
        for found in self._infos():
            yield found if isinstance(found, Unreadable) else self._address(found["name"])

    def _infos(self) -> Iterator[Mapping[str, Any] | Unreadable]:
        """What the file system tells of each file, and what could not be searched."""
        if glob.has_magic(self.path):
            yield from self._matches()
            return
        try:
            info = self.system.info(self.path)
        except Exception as error:  # whatever a driver raises
            yield Unreadable(id=printable(self.word), message=f"cannot read it: {reason(error)}")
            return
        if info["type"] == "directory":
            yield from self._walk(self.path, None, _is_medium)
        else:
            yield info

    def _matches(self) -> Iterator[Mapping[str, Any] | Unreadable]:
        from fsspec.utils import glob_translate

        fits = re.compile(glob_translate(self.path.strip("/"))).match
        last = posixpath.splitext(self.path)[1]
        is_wanted = _is_medium if not last or glob.has_magic(last) else bool
        root = _fixed_part(self.path)
        depth = None if "**" in self.path else self.path.count("/") - root.count("/") + (not root.strip("/"))
        yield from self._walk(root, depth, lambda name: fits(name) is not None and is_wanted(name))

    def _walk(
        self, root: str, depth: int | None, is_wanted: Callable[[str], bool]
    ) -> Iterator[Mapping[str, Any] | Unreadable]:
        """depth: of folders in each other, at most; None for any."""
        left = [(root, 1)]
        while left:
            folder, level = left.pop()
            try:
                entries = sorted(self.system.ls(folder, detail=True), key=lambda entry: str(entry["name"]))
            except Exception as error:
                message = f"cannot read the folder: {reason(error)}"
                yield Unreadable(id=printable(self._address(folder)), message=message)
                continue
            below = []
            for entry in entries:
                name = entry["name"].strip("/")
                if posixpath.basename(name).startswith(".") or name == folder.strip("/"):
                    continue
                if entry["type"] == "directory":
                    below.append((entry["name"], level + 1))
                elif is_wanted(name):
                    yield entry
            if depth is None or level < depth:
                left += reversed(below)

    def _item(self, info: Mapping[str, Any]) -> MediumItem:
        name, address = info["name"], self._address(info["name"])

        def read() -> bytes:
            data = read_path(self.system, name, address, self.media.fetcher.settings.limit(Modality.VIDEO))
            modality_within_limit(data, self.media.fetcher.settings)
            return data

        id = printable(address)
        size = info.get("size") or 0
        return MediumItem(id=id, signature=signature(info), size=size, read=read, fields=name_fields(id, name))

    def _address(self, name: str) -> str:
        """Of a file in the file system, beginning as the word does."""
        if name.strip("/") == self.path.strip("/"):
            return self.word
        first, chain, rest = self.word.partition("::")
        scheme, _, written = first.partition("://")
        folder = _fixed_part(written) if glob.has_magic(written) else written.rstrip("/")
        below = name.strip("/").removeprefix(_fixed_part(self.path).strip("/")).strip("/")
        return f"{scheme}://{folder}{'/' if folder else ''}{below}{chain}{rest}"


def _fixed_part(path: str) -> str:
    """The folder in which a search begins."""
    if not glob.has_magic(path):
        return path
    parts = path.split("/")
    return "/".join(parts[: next(place for place, part in enumerate(parts) if glob.has_magic(part))])


def _is_medium(name: str) -> bool:
    return posixpath.splitext(name)[1].lower() in PICTURES + VIDEOS
