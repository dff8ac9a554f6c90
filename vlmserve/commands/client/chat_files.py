"""The files of a chat's messages: found by path or URL, put in as bytes, and sent as data: URLs."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from processors.fetch.limits import FetchSettings
from processors.formats import HEAD_BYTES, first_bytes, mime_type, modality_of
from processors.inputs import Modality
from vlmserve.frontend.chat_messages import map_parts
from vlmserve_common.errors import BadRequestError

Message: TypeAlias = Mapping[str, Any]
_MODALITIES = {
    "image_url": Modality.IMAGE,
    "image": Modality.IMAGE,
    "video_url": Modality.VIDEO,
    "video": Modality.VIDEO,
}


def told_modality(data: bytes) -> Modality:
    """Return the modality that a file's first bytes tell. Raises BadRequestError if it is no medium."""
    modality = modality_of(data[:HEAD_BYTES])
    if modality is None:
        what = f"neither a picture nor a video of a supported format; it begins with {first_bytes(data)}"
        raise BadRequestError(f"the file is {what if data else 'empty'}", code="unsupported_content")
    return modality


def modality_within_limit(data: bytes, settings: FetchSettings) -> Modality:
    """Return a file's modality. Raises BadRequestError if it is no medium, or larger than its modality's limit."""
    modality = told_modality(data)
    limit = settings.limit(modality)
    if len(data) > limit.bytes:
        what = f"the file has {len(data)} bytes, the limit is {limit.bytes} (setting {limit.setting})"
        raise BadRequestError(what, code="invalid_media_url")
    return modality


def named_files(messages: Sequence[Message]) -> Iterator[tuple[str, str, Modality]]:
    """Yield the files that messages name: the place in the request, the path or URL, the modality.

    data: URLs are not among them.
    """
    for number, message in enumerate(messages):
        parts = message.get("content")
        for place, part in enumerate(parts if isinstance(parts, list) else ()):
            for address in _named_by(part):
                yield f"messages[{number}].content[{place}]", address, _MODALITIES[part["type"]]


def with_files(messages: Sequence[Message], files: Mapping[tuple[str, Modality], bytes]) -> list[Message]:
    """Return messages with the bytes of the files that `named_files` yields.

    They stand in parts of Qwen's form: {"type": "image", "image": bytes}.
    """

    def with_file(part: Mapping[str, Any], _place: str) -> Mapping[str, Any]:
        if not _named_by(part):
            return part
        kind = part["type"]
        modality, value = _MODALITIES[kind], part[kind]
        others = {name: given for name, given in part.items() if name not in ("type", kind)}
        if isinstance(value, Mapping):
            others |= {name: given for name, given in value.items() if name != "url"}
            value = value["url"]
        if isinstance(value, list):
            # uploaded files stay as they are
            content: object = [files.get((one, modality), one) if isinstance(one, str) else one for one in value]
        else:
            content = files[value, modality]
        return {**others, "type": modality.value, modality.value: content}

    return map_parts(messages, with_file)


def with_data_urls(messages: Sequence[Message]) -> list[Message]:
    """Return messages as JSON for a server. messages: files are bytes or URLs, in parts of Qwen's form.

    They become image_url and video_url parts, which all servers know. A part's other fields (knobs) stay beside them.
    A list of frames stays in Qwen's form, since OpenAI's API has none for it.
    """

    def url(content: Any) -> Any:
        return data_url(content) if isinstance(content, bytes) else content  # URLs and uploaded files stay

    def with_url(part: Mapping[str, Any], _place: str) -> Mapping[str, Any]:
        kind = part.get("type")
        value = part.get(kind) if kind in ("image", "video") else None
        if isinstance(value, list):
            return {**part, "video": [url(frame) for frame in value]}
        if not isinstance(value, bytes | str):
            return part
        others = {name: given for name, given in part.items() if name not in ("type", kind, "detail")}
        source = {"url": url(value)}
        if part.get("detail") is not None:
            source["detail"] = part["detail"]
        return {**others, "type": f"{kind}_url", f"{kind}_url": source}

    return map_parts(messages, with_url)


def data_url(content: bytes) -> str:
    """Return a picture's or video's file as a URL."""
    return f"data:{mime_type(content[:HEAD_BYTES])};base64,{base64.b64encode(content).decode()}"


def _named_by(part: Mapping[str, Any]) -> list[str]:
    value = part.get(part["type"]) if part.get("type") in _MODALITIES else None
    if isinstance(value, Mapping):
        value = value.get("url")
    values = value if isinstance(value, list) else [value]
    return [address for address in values if isinstance(address, str) and not address.startswith("data:")]
