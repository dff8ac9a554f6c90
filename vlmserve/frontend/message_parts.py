"""Messages in OpenAI's form (plain dicts), changed part by part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


def map_parts(messages: Sequence[Mapping[str, Any]], change: Callable[[Any, str], Any]) -> list[Mapping[str, Any]]:
    """The messages with `change(part, its place)` for each part, e.g. at "messages[0].content[1]". A message whose
    content is no list stays as it is."""

    def changed(message: Mapping[str, Any], place: str) -> Mapping[str, Any]:
        parts = message.get("content")
        if not isinstance(parts, list | tuple):
            return message
        return {**message, "content": [change(part, f"{place}.content[{i}]") for i, part in enumerate(parts)]}

    return [changed(message, f"messages[{i}]") for i, message in enumerate(messages)]
