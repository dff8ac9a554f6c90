"""From a path, a URL or bytes to an item."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import blake3

from processors.fetch.blocking import BlockingFetcher
from processors.inputs import Modality
from vlmserve.commands.batch.inputs.source import HTTP, name_fields, path_in, printable
from vlmserve.commands.batch.item import MediumItem
from vlmserve.commands.client.chat_files import modality_within_limit
from vlmserve.commands.client.media_names import scheme_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """A file that is not read yet. See `MediumItem`."""

    signature: str | None
    size: int = 0
    path: Path | None = None
    read: Callable[[], bytes]


@dataclass(frozen=True, kw_only=True, slots=True)
class Own:
    """What a source says of an item itself."""

    id: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    prompt: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


class MediaReader:
    """fetcher: may read any local file, for the user has named it."""

    def __init__(self, fetcher: BlockingFetcher) -> None:
        self.fetcher = fetcher

    def open(self, address: str, modality: Modality | None = None) -> Content:
        """Look at the file of a path or URL, without reading it. modality: None if any will do."""
        scheme = scheme_of(address)
        if not scheme:
            return self._open_file(Path(address), modality)
        signature = address
        if scheme == "data":
            signature = f"data:{blake3.blake3(address.encode('utf-8', 'surrogateescape')).hexdigest()[:32]}"
        return Content(signature=signature, read=lambda: self._read(address, modality))

    def item(self, address: str, own: Own | None = None, *, root: Path | None = None) -> MediumItem:
        """Of a path or URL. root: see `MediumItem`."""
        content = self.open(address)
        is_data = scheme_of(address) == "data"
        own = own or Own()
        id = own.id or printable(content.signature if is_data and content.signature else address)
        return _item(content, replace(own, id=id), None if is_data else path_in(address), root)

    def held(
        self, read: Callable[[], bytes], own: Own, *, signature: str | None, size: int, name: str | None
    ) -> MediumItem:
        """A medium that `read` brings, such as one inside a larger file. name: its own in there."""

        def checked() -> bytes:
            data = read()
            modality_within_limit(data, self.fetcher.settings)
            return data

        return _item(Content(signature=signature, size=size, read=checked), own, name, None)

    def _open_file(self, path: Path, modality: Modality | None) -> Content:
        try:
            status = os.stat(path)
        except (OSError, ValueError):  # reading will tell
            signature, size = None, 0
        else:
            signature, size = f"{status.st_size} {status.st_mtime_ns}", status.st_size
        url = path.absolute().as_uri()
        return Content(signature=signature, size=size, path=path, read=lambda: self._read(url, modality))

    def _read(self, url: str, modality: Modality | None) -> bytes:
        if scheme_of(url) in ("file", "data", *HTTP):
            data = self.fetcher.fetch(url, modality=modality or Modality.VIDEO)
        else:
            from vlmserve.commands.batch.inputs.remote import read_whole

            data = read_whole(url, self.fetcher.settings.limit(modality or Modality.VIDEO))
        if modality is None:
            modality_within_limit(data, self.fetcher.settings)
        return data


def _item(content: Content, own: Own, name: str | None, root: Path | None) -> MediumItem:
    assert own.id is not None
    return MediumItem(
        id=own.id,
        signature=content.signature,
        size=content.size,
        read=content.read,
        fields={**name_fields(own.id, name), **own.fields},
        prompt=own.prompt,
        options=own.options,
        path=content.path,
        root=root,
    )
