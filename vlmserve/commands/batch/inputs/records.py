"""One object or row, with a medium among its fields: to an item."""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Mapping
from typing import Any

from vlmserve.commands.batch.inputs.media import MediaReader, Own
from vlmserve.commands.batch.inputs.source import Columns, resolved
from vlmserve.commands.batch.item import MediumItem
from vlmserve.commands.client.media_names import scheme_of
from vlmserve_common.errors import BadRequestError

MEDIA_COLUMNS = (
    *("image", "img", "picture", "photo", "video", "clip", "jpg", "jpeg", "png", "webp", "mp4"),
    *("bytes", "image_bytes", "video_bytes", "image_url", "video_url", "image_path", "video_path", "file_path"),
    *("path", "file", "file_name", "filename", "url"),
)
"""The names that are looked for, in this order, whatever their case."""
KWARGS = "mm_processor_kwargs"
_CODE = "invalid_item"


def media_column(names: Iterable[str], wanted: str | None) -> str | None:
    """Which of these columns is the medium's."""
    if wanted is not None:
        return wanted if wanted in set(names) else None
    known = {name.lower(): name for name in reversed(list(names))}
    return next((known[name] for name in MEDIA_COLUMNS if name in known), None)


def item_of(
    record: Mapping[str, Any], column: str, *, id: str, signature: str, base: str, media: MediaReader, columns: Columns
) -> MediumItem:
    """The item that a record makes. id, signature: where the record has none, and its medium is within it.

    Raises BadRequestError.
    """
    value = record[column]
    own = _own(record, column, id, columns)
    path = None
    if isinstance(value, Mapping):
        path = value["path"] if isinstance(value.get("path"), str) else None
        value = next((value[name] for name in ("bytes", "path", "url") if value.get(name) is not None), None)
    if isinstance(value, bytes):
        return media.held(lambda: value, own, signature=signature, size=len(value), name=path)
    if not isinstance(value, str) or not value:
        told = "nothing" if value is None else f"a value of type {type(value).__name__}"
        raise BadRequestError(f"{column} is {told}; it must be a path, a URL or a file's bytes", code=_CODE)
    return media.item(resolved(value, base), own)


def jsonable(value: Any) -> Any:
    """A value as JSON has it, or as text; None for bytes."""
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


def _own(record: Mapping[str, Any], column: str, id: str, columns: Columns) -> Own:
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
    return Own(
        id=id if given in (None, "") else str(given),
        fields=fields,
        prompt=prompt,
        options={KWARGS: dict(kwargs)} if kwargs else {},
    )


def _is_inline(name: str, column: str, value: Any) -> bool:
    """Whether it is the medium itself, and not its name."""
    return name == column and (isinstance(value, Mapping) or (isinstance(value, str) and scheme_of(value) == "data"))
