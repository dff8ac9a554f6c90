"""Calls of tools in an answer: how a request may use tools, reading calls in any format, and grammars that hold them.

https://xgrammar.mlc.ai/docs/structural_tag/structural_tag has the form of the grammars.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias


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


Tool = Mapping[str, Any]
"""A tool of a request, in OpenAI's form: {"type": "function", "function": {"name", "parameters", ...}}."""


class State(enum.Enum):
    """The state of a call that is being read. REFUSED: it is no call, and its characters are plain text."""

    OPEN = enum.auto()
    CLOSED = enum.auto()
    REFUSED = enum.auto()


class CallReader:
    """Reads one call, from behind its opening tag, in steps that follow each other. Once it has made a piece, the call
    can no longer be refused. index: the call's number."""

    def __init__(self, index: int, first: Step) -> None:
        self.state = State.OPEN
        self._index = index
        self._read = first

    def read(self, text: str, pieces: list[Piece], *, final: bool) -> int:
        """Read on and return the number of characters taken; the rest comes again, with more. final: nothing comes
        behind this text, so the call must end."""
        taken = 0
        while self.state is State.OPEN:
            took = self._read(text[taken:], pieces, final)
            if took is None:
                break
            taken += took
        return taken


Step: TypeAlias = Callable[[str, list[Piece], bool], int | None]
"""text, pieces, final -> the number of characters taken; None if the step needs more text or has ended the call."""


@dataclass(frozen=True, kw_only=True)
class CallFormat:
    """The format in which a model writes calls.

    tags: texts that open a call, the proper one first. reader: makes the reader of one call from its tag, its index and
    the request's tools. wrap: name -> the texts before and behind the arguments. style: xgrammar's name of the format.
    """

    name: str
    tags: Sequence[str]
    reader: Callable[[str, int, Sequence[Tool]], CallReader]
    wrap: Callable[[str], tuple[str, str]]
    style: str


class CallParser:
    """Splits text into text and calls. Blanks before a call, and behind the last, are no text.

    tools: those that the request brought, whose schemas some formats need. only_calls: a grammar holds the answer to
    calls, so a text that is no call is the beginning of one, cut where the answer was. It is left out.
    """

    def __init__(self, call_format: CallFormat, tools: Sequence[Tool], *, only_calls: bool = False) -> None:
        self._format = call_format
        self._tools = tools
        self._only_calls = only_calls
        self._opening = re.compile("|".join(map(re.escape, call_format.tags)))
        self._buffer = ""
        self._reader: CallReader | None = None
        self._opened = ""  # by this, with the blanks before it
        self._calls = 0
        self._after_call = False

    def feed(self, text: str, *, final: bool = False) -> list[Piece]:
        """Read on; see `Parser`."""
        self._buffer += text
        pieces: list[Piece] = []
        while self._read_call(pieces, final) if self._reader else self._find_call(pieces, final):
            pass
        return pieces

    def _find_call(self, pieces: list[Piece], final: bool) -> bool:
        """Look for the next call; return whether there is more to read."""
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
        if text and not self._only_calls:
            pieces.append(Text(text))
            self._after_call = False


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """How the answers to a request may use its tools.

    tools: one or more. call_format: how the model writes calls. choice: with "required" the answer must be calls. name:
    the tool that must be called, once. parallel: whether one answer may have several calls.
    """

    tools: Sequence[Tool]
    call_format: CallFormat
    choice: Literal["auto", "required"] = "auto"
    name: str | None = None
    parallel: bool = True

    @property
    def required(self) -> bool:
        """Return whether the answer must be a call."""
        return self.name is not None or self.choice == "required"


# A small model may go on with whitespace. JSON has the same as in other structured output (see `grammar.serving`); a
# format of tags has a line break where a model writes one.
_LITTLE_WHITESPACE = {"any_whitespace": False, "max_whitespace_cnt": 1}


def call_grammar(use: ToolUse) -> dict[str, Any] | None:
    """Return the structural tag that answers must match; None if any text will do.

    An answer that must call has nothing but calls. Other answers may have text, and their calls follow the schemas of
    strict tools.
    """
    if use.required:
        return only_calls(use)
    if use.parallel and not any(map(_is_strict, use.tools)):
        return None
    return _tag(
        {
            "type": "triggered_tags",
            "triggers": [use.call_format.tags[0]],
            "tags": [_call(tool, use) for tool in use.tools],
            "stop_after_first": not use.parallel,
        }
    )


def only_calls(use: ToolUse) -> dict[str, Any]:
    """Return the structural tag of an answer that is nothing but one or more calls."""
    if use.name is not None:
        [tool] = [tool for tool in use.tools if tool["function"]["name"] == use.name]
        return _tag(_call(tool, use))
    return _tag(
        {
            "type": "tags_with_separator",
            "tags": [_call(tool, use) for tool in use.tools],
            "separator": "\n",
            "at_least_one": True,
            "stop_after_first": not use.parallel,
        }
    )


def _is_strict(tool: Tool) -> bool:
    return bool(tool["function"].get("strict"))


def _tag(form: dict[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": form}


def _call(tool: Tool, use: ToolUse) -> dict[str, Any]:
    """Return the tag of one call. Its arguments follow their schema if the tool is strict. A tool that does not say
    counts as strict if calls are required."""
    function = tool["function"]
    begin, end = use.call_format.wrap(function["name"])
    held = _is_strict(tool) or (use.required and function.get("strict") is None)
    schema = function.get("parameters") if held else None
    content = {
        "type": "json_schema",
        "json_schema": {"type": "object"} if schema is None else schema,
        "style": use.call_format.style,
        **_LITTLE_WHITESPACE,
    }
    return {"type": "tag", "begin": begin, "content": content, "end": end}
