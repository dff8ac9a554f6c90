"""The inputs of a body, in any client's form, as texts and parts of messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vlmserve.api.pooling.protocol import ContentObject
from vlmserve.frontend.pooled import Content

_SCHEMES = ("data:", "http:", "https:", "file:")


def content_of(given: str | ContentObject) -> Content:
    """Return one input as a text or as parts."""
    if isinstance(given, str):
        return given
    if given.content is not None:
        return given.content  # kept as the client wrote them
    if given.text is not None:
        return given.text
    kind = "image" if given.image is not None else "video"
    return [media_part(kind, given.image or given.video or "")]


def media_part(kind: str, source: str) -> dict[str, Any]:
    """Return the part of a picture or a video. source: a URL, or base64."""
    if not source.lower().startswith(_SCHEMES):
        source = f"data:{kind}/unknown;base64,{source}"
    return {"type": f"{kind}_url", f"{kind}_url": {"url": source}}


def places(name: str, given: Any) -> list[str]:
    """Return the place of each input of a field, for errors."""
    if isinstance(given, Sequence) and not isinstance(given, str):
        return [f"{name}[{index}]" for index in range(len(given))]
    return [name]
