"""Tags in text that comes bit by bit."""

from __future__ import annotations

from collections.abc import Iterable


def could_begin(text: str, tag: str) -> bool:
    """Whether more text may make it one that starts with the tag."""
    return len(text) < len(tag) and tag.startswith(text)


def begun_tag(text: str, tags: Iterable[str]) -> int:
    """How many characters at the text's end may be the beginning of one of the tags."""
    return max((_begun(text, tag) for tag in tags), default=0)


def _begun(text: str, tag: str) -> int:
    longest = min(len(text), len(tag) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(tag[:size])), 0)
