"""Items made of a path, a URL, bytes, or a record that has a medium among its fields."""

from __future__ import annotations

import datetime
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import blake3

from processors.fetch.fetching import BlockingFetcher
from processors.inputs import Modality
from vlmserve.commands.batch.inputs.files import HTTP, Columns, name_fields, path_in, printable, resolved
from vlmserve.commands.batch.item import MediumItem
from vlmserve.commands.client.media import modality_within_limit, scheme_of
from vlmserve_common.errors import BadRequestError

MEDIA_COLUMNS = (
    *("image", "img", "picture", "photo", "video", "clip", "jpg", "jpeg", "png", "webp", "mp4"),
    *("bytes", "image_bytes", "video_bytes", "image_url", "video_url", "image_path", "video_path", "file_path"),
    *("path", "file", "file_name", "filename", "url"),
)
"""The usual names of media, in the order of search. Case does not matter."""
KWARGS = "mm_processor_kwargs"
_CODE = "invalid_item"


class MediaReader:
    """Makes items of media. fetcher: may read any local file, since the user has named it."""

    def __init__(self, fetcher: BlockingFetcher) -> None:
        self.fetcher = fetcher

    def open(self, address: str, modality: Modality | None = None) -> MediumItem:
        """Make an item of the file of a path or URL, without reading it. modality: None accepts any."""
        scheme, url = scheme_of(address), address
        signature: str | None = address
        size, path = 0, None
        if scheme == "data":
            digest = blake3.blake3(address.encode("utf-8", "surrogateescape")).hexdigest()[:32]
            signature = f"data:{digest}"
        elif not scheme:
            path = Path(address)
            url = path.absolute().as_uri()
            try:
                status = os.stat(path)
                signature, size = f"{status.st_size} {status.st_mtime_ns}", status.st_size
            except (OSError, ValueError):  # reading will report it
                signature = None
        id = printable(signature if scheme == "data" and signature else address)
        read = partial(self._read, url, modality)
        return MediumItem(id=id, signature=signature, size=size, path=path, read=read, root=None)

    def item(self, address: str, *, root: Path | None = None, **own: Any) -> MediumItem:
        """Make the item of a path or URL. root, own: fields of `MediumItem` that the source sets."""
        name = None if scheme_of(address) == "data" else path_in(address)
        return _named(replace(self.open(address), root=root, **own), name)

    def held(
        self, read: Callable[[], bytes], *, signature: str | None, size: int, name: str | None, **own: Any
    ) -> MediumItem:
        """Make the item of a medium that `read` returns, such as one inside a larger file. name: its name there."""

        def checked() -> bytes:
            data = read()
            modality_within_limit(data, self.fetcher.settings)
            return data

        return _named(MediumItem(signature=signature, size=size, read=checked, **own), name)

    def _read(self, url: str, modality: Modality | None) -> bytes:
        if scheme_of(url) in ("file", "data", *HTTP):
            data = self.fetcher.fetch(url, modality=modality or Modality.VIDEO)
        else:
            from vlmserve.commands.batch.inputs.remote import read_whole

            data = read_whole(url, self.fetcher.settings.limit(modality or Modality.VIDEO))
        if modality is None:
            modality_within_limit(data, self.fetcher.settings)
        return data


def _named(item: MediumItem, name: str | None) -> MediumItem:
    return replace(item, fields={**name_fields(item.id, name), **item.fields})


def media_column(names: Iterable[str], wanted: str | None) -> str | None:
    """Return the column that holds the medium, if there is one."""
    if wanted is not None:
        return wanted if wanted in set(names) else None
    known = {name.lower(): name for name in reversed(list(names))}
    return next((known[name] for name in MEDIA_COLUMNS if name in known), None)


def item_of(
    record: Mapping[str, Any], column: str, *, id: str, signature: str, base: str, media: MediaReader, columns: Columns
) -> MediumItem:
    """Make the item of a record. id: for a record without one. signature: for a medium inside the record.

    Raises BadRequestError.
    """
    value = record[column]
    own = _own(record, column, id, columns)
    path = None
    if isinstance(value, Mapping):
        path = value["path"] if isinstance(value.get("path"), str) else None
        value = next((value[name] for name in ("bytes", "path", "url") if value.get(name) is not None), None)
    if isinstance(value, bytes):
        return media.held(lambda: value, signature=signature, size=len(value), name=path, **own)
    if not isinstance(value, str) or not value:
        told = "nothing" if value is None else f"a value of type {type(value).__name__}"
        raise BadRequestError(f"{column} is {told}; it must be a path, a URL or a file's bytes", code=_CODE)
    return media.item(resolved(value, base), **own)


def jsonable(value: Any) -> Any:
    """Convert a value to JSON's types, or to text; None for bytes."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {str(name): jsonable(one) for name, one in value.items() if not isinstance(one, bytes)}
    if isinstance(value, list | tuple):
        return [jsonable(one) for one in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    return None if isinstance(value, bytes) else str(value)


def _own(record: Mapping[str, Any], column: str, id: str, columns: Columns) -> dict[str, Any]:
    """Return the fields of `MediumItem` that a record sets."""

    def own(name: str | None, kind: type | tuple[type, ...], what: str) -> Any:
        value = record.get(name) if name is not None else None
        if value is not None and not isinstance(value, kind):
            raise BadRequestError(f"{name} is of type {type(value).__name__}; it must be {what}", code=_CODE)
        return value

    prompt, given = own(columns.prompt, str, "text"), own(columns.id, (str, int), "text")
    kwargs = own(KWARGS, Mapping, "an object")
    fields = {
        str(name): jsonable(value)
        for name, value in record.items()
        if not isinstance(value, bytes) and name not in (KWARGS, columns.prompt) and not _is_inline(name, column, value)
    }
    return {
        "id": id if given in (None, "") else str(given),
        "fields": fields,
        "prompt": prompt,
        "options": {KWARGS: dict(kwargs)} if kwargs else {},
    }


def _is_inline(name: str, column: str, value: Any) -> bool:
    """Return True for the medium itself, False for its name."""
    return name == column and (isinstance(value, Mapping) or (isinstance(value, str) and scheme_of(value) == "data"))
