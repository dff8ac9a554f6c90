"""Parts of messages that name uploaded files, put into the form of parts that bring a medium themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from processors.fetch.fetching import MediaFile
from vlmserve.frontend.message_parts import map_parts
from vlmserve_common.errors import BadRequestError

FindFile: TypeAlias = Callable[[str], MediaFile]
"""A file's id -> the file. Raises BadRequestError (404)."""

# type of a part -> of the one that brings the medium
_URL_PARTS = {"image_url": "image", "video_url": "video", "image_embeds": "image_embeds"}


def with_files(messages: Sequence[Mapping[str, Any]], find: FindFile | None) -> list[Mapping[str, Any]]:
    """The messages with files for their ids: {"type": "image", "image": MediaFile} or the same with "video".

    An id stands in {"type": "file", "file": {"file_id": ...}}, where the file's first bytes tell which of both it is,
    in the place of a URL, or in that of a video's frame, {"type": "video", "video": [{"file_id": ...}]}.
    find: None where there are no uploaded files. Raises BadRequestError naming the part.
    """
    return map_parts(messages, lambda part, place: _with_file(part, place, find))


def _with_file(part: Any, param: str, find: FindFile | None) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "file":
        place, given = f"{param}.file", part.get("file")
        if not isinstance(given, Mapping) or given.get("file_id") is None:
            raise BadRequestError(
                f"{place} has no file_id; only files uploaded to /v1/files are supported here, data: URLs in image_url "
                "and video_url parts",
                param=place,
                code="unsupported_content",
            )
        file = _find(given["file_id"], place, find)
        modality = file.modality
        if modality is None:
            raise BadRequestError(
                f"{place}: the file {given['file_id']} is neither a picture nor a video of a supported format",
                param=f"{place}.file_id",
                code="unsupported_content",
            )
        return {"type": modality.value, modality.value: file}
    if kind in _URL_PARTS and isinstance(given := part.get(kind), Mapping) and given.get("file_id") is not None:
        name = _URL_PARTS[kind]
        others = {key: value for key, value in part.items() if key != kind}
        rest = {key: value for key, value in given.items() if key not in ("file_id", "url")}
        return {**others, **rest, "type": name, name: _find(given["file_id"], f"{param}.{kind}", find)}
    if kind == "video" and isinstance(frames := part.get("video"), list | tuple):
        return {**part, "video": [_frame(one, f"{param}.video[{place}]", find) for place, one in enumerate(frames)]}
    return part


def _frame(given: Any, param: str, find: FindFile | None) -> Any:
    if isinstance(given, Mapping) and given.get("file_id") is not None:
        return _find(given["file_id"], param, find)
    return given


def _find(file_id: Any, param: str, find: FindFile | None) -> MediaFile:
    param = f"{param}.file_id"
    if find is None:
        raise BadRequestError(f"{param}: there are no uploaded files without a server", param=param)
    try:
        return find(file_id)
    except BadRequestError as error:
        error.param = param
        raise
