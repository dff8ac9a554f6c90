"""Calls of tools within an answer's text, whatever their format."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vlmserve.frontend.parsers.pieces import Piece, Text
from vlmserve.frontend.parsers.tags import begun_tag

Tool = Mapping[str, Any]
"""A tool of a request, in OpenAI's form: {"type": "function", "function": {"name", "parameters", ...}}."""


class State(enum.Enum):
    """Of a call that is being read. REFUSED: it is none, and its text is text."""

    OPEN = enum.auto()
    CLOSED = enum.auto()
    REFUSED = enum.auto()


class CallReader(Protocol):
    """Reads one call, from behind its opening tag. Once it has made a piece, it is a call and stays one."""

    state: State

    def read(self, text: str, pieces: list[Piece], *, final: bool) -> int:
        """How many characters it took; the rest comes again, with more. final: no more comes, and it must end."""


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    """How a model writes calls. tags: what may open one, the proper one first. reader: reads one; takes the tag, the
    call's index and the request's tools. wrap: name -> what stands before and behind the arguments. style: xgrammar's
    word for those."""

    name: str
    tags: Sequence[str]
    reader: Callable[[str, int, Sequence[Tool]], CallReader]
    wrap: Callable[[str], tuple[str, str]]
    style: str


class CallParser:
    """Splits text into text and calls. Blanks before a call, and behind the last, are no text.

    tools: those that the request brought, whose schemas some formats need.
    """

    def __init__(self, call_format: CallFormat, tools: Sequence[Tool]) -> None:
        self._format = call_format
        self._tools = tools
        self._opening = re.compile("|".join(map(re.escape, call_format.tags)))
        self._buffer = ""
        self._reader: CallReader | None = None
        self._opened = ""  # by this, with the blanks before it
        self._calls = 0
        self._after_call = False

    def feed(self, text: str, *, final: bool = False) -> list[Piece]:
        """See `Parser`."""
        self._buffer += text
        pieces: list[Piece] = []
        while self._read_call(pieces, final) if self._reader else self._find_call(pieces, final):
            pass
        return pieces

    def _find_call(self, pieces: list[Piece], final: bool) -> bool:
        """Whether there is more to read in what has come."""
        opening = self._opening.search(self._buffer)
        if opening is None:
            keep = 0 if final else begun_tag(self._buffer, self._format.tags)
            shown = self._buffer[: len(self._buffer) - keep]
            if not final or (self._after_call and not shown.strip()):
                shown = shown.rstrip()
            self._show(shown, pieces)
            self._buffer = "" if final else self._buffer[len(shown) :]
            return False
        shown = self._buffer[: opening.start()].rstrip()
        self._show(shown, pieces)
        self._opened = self._buffer[len(shown) : opening.end()]
        self._buffer = self._buffer[opening.end() :]
        self._reader = self._format.reader(opening.group(), self._calls, self._tools)
        return True

    def _read_call(self, pieces: list[Piece], final: bool) -> bool:
        assert self._reader is not None
        taken = self._reader.read(self._buffer, pieces, final=final)
        self._buffer = self._buffer[taken:]
        if self._reader.state is State.OPEN:
            return False
        if self._reader.state is State.REFUSED:
            self._show(self._opened, pieces)
        else:
            self._calls += 1
            self._after_call = True
        self._reader = None
        return True

    def _show(self, text: str, pieces: list[Piece]) -> None:
        if text:
            pieces.append(Text(text))
            self._after_call = False
