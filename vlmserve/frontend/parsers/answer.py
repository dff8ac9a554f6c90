"""The formats of calls and thoughts that a model writes, and the parser of one answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from vlmserve.frontend.parsers.calls import CallFormat, CallParser, ToolUse
from vlmserve.frontend.parsers.hermes import HERMES
from vlmserve.frontend.parsers.pieces import Parser, Piece, Text, joined
from vlmserve.frontend.parsers.qwen3_coder import QWEN3_CODER
from vlmserve.frontend.parsers.reasoning import OPEN as THINK
from vlmserve.frontend.parsers.reasoning import ReasoningParser

AUTO, NONE = "auto", "none"
CALL_FORMATS: Mapping[str, CallFormat] = {fmt.name: fmt for fmt in (HERMES, QWEN3_CODER)}


@dataclass(frozen=True, kw_only=True)
class AnswerFormats:
    """The formats that a model writes. reasoning: whether it writes thoughts before the answer."""

    calls: CallFormat = HERMES
    reasoning: bool = False


@dataclass(frozen=True, kw_only=True)
class AnswerReading:
    """The things to find in one request's answers. calls: None without tools."""

    calls: ToolUse | None = None
    reasoning: bool = False

    def parser(self, *, thinking: bool) -> Parser | None:
        """Make the parser of one answer; None if the text is all there is. thinking: the prompt has begun the
        thoughts."""
        parsers: list[Parser] = [ReasoningParser(opened=thinking)] if self.reasoning else []
        if self.calls is not None:
            parsers.append(CallParser(self.calls.call_format, self.calls.tools))
        return _Chain(parsers) if parsers else None


NO_FORMATS, PLAIN_TEXT = AnswerFormats(), AnswerReading()


def choose_formats(tool_call_parser: str, reasoning_parser: str, template: str) -> AnswerFormats:
    """Choose formats by the settings of these names; auto goes by the words of the chat template."""
    if tool_call_parser == AUTO:
        tool_call_parser = QWEN3_CODER.name if QWEN3_CODER.tags[-1] in template else HERMES.name
    thinks = THINK in template if reasoning_parser == AUTO else reasoning_parser != NONE
    return AnswerFormats(calls=CALL_FORMATS[tool_call_parser], reasoning=thinks)


class _Chain:
    """A chain of parsers. Each one splits the text that the parser before it leaves."""

    def __init__(self, parsers: Sequence[Parser]) -> None:
        self._parsers = parsers

    def feed(self, text: str, *, final: bool = False) -> list[Piece]:
        pieces: list[Piece] = [Text(text)]
        for parser in self._parsers:
            split = (parser.feed(piece.text) if isinstance(piece, Text) else [piece] for piece in pieces)
            pieces = [*chain.from_iterable(split), *(parser.feed("", final=True) if final else ())]
        return joined(pieces)
