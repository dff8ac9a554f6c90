"""The pieces of an answer, in the order that they come: text, thoughts and calls of tools; and tags cut in two."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Text:
    """More of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of the model's thoughts before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call of a function. index: 0 for the answer's first."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments, which together are a JSON object (cut where the answer was)."""

    index: int
    text: str


Piece: TypeAlias = Text | Reasoning | CallBegin | CallArguments


class Parser(Protocol):
    """Splits a text that comes bit by bit. The pieces, joined, do not depend on where the bits begin and end."""

    def feed(self, text: str, *, final: bool = False) -> list[Piece]:
        """Return the pieces that are certain by now. final: nothing comes after this text."""


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Join neighbours of one kind, and drop empty pieces."""
    out: list[Piece] = []
    for piece in pieces:
        last = out[-1] if out else None
        if isinstance(piece, CallBegin):
            out.append(piece)
        elif not piece.text:
            continue
        elif isinstance(last, Text | Reasoning | CallArguments) and replace(piece, text=last.text) == last:
            out[-1] = replace(piece, text=last.text + piece.text)
        else:
            out.append(piece)
    return out


def could_begin(text: str, tag: str) -> bool:
    """Return whether more text may complete the tag at the text's beginning."""
    return len(text) < len(tag) and tag.startswith(text)


def begun_tag(text: str, tags: Iterable[str]) -> int:
    """Return how many characters at the text's end may be the beginning of one of the tags."""
    return max((_begun(text, tag) for tag in tags), default=0)


def _begun(text: str, tag: str) -> int:
    longest = min(len(text), len(tag) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(tag[:size])), 0)
