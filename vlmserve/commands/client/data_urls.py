"""Messages for a server elsewhere: JSON, in the API's form, with files in data: URLs."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from processors.formats import HEAD_BYTES, mime_type
from vlmserve.frontend.message_parts import map_parts


def with_data_urls(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """messages: files are bytes, or URLs, in parts of Qwen's form ({"type": "image", "image": bytes}).

    They become image_url and video_url parts, which all servers know, with a part's other fields (knobs) beside them;
    a list of frames stays in Qwen's form, for there is no other.
    """
    return map_parts(messages, _part)


def _part(part: Mapping[str, Any], _place: str) -> Mapping[str, Any]:
    kind = part.get("type")
    value = part.get(kind) if kind in ("image", "video") else None
    if isinstance(value, list):
        return {**part, "video": [_url(frame) for frame in value]}
    if not isinstance(value, bytes | str):
        return part
    others = {name: given for name, given in part.items() if name not in ("type", kind, "detail")}
    source = {"url": _url(value)}
    if part.get("detail") is not None:
        source["detail"] = part["detail"]
    return {**others, "type": f"{kind}_url", f"{kind}_url": source}


def _url(content: Any) -> Any:
    """URLs, and uploaded files, stay as they are."""
    return data_url(content) if isinstance(content, bytes) else content


def data_url(content: bytes) -> str:
    """A picture's or video's file as a URL."""
    return f"data:{mime_type(content[:HEAD_BYTES])};base64,{base64.b64encode(content).decode()}"
