"""What reads a model's answers: which formats of calls and thoughts it writes, and a parser of one answer."""

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
    """How a model writes. reasoning: whether thoughts are to be told from the answer."""

    calls: CallFormat = HERMES
    reasoning: bool = False


@dataclass(frozen=True, kw_only=True)
class AnswerReading:
    """What is to be found in one request's answers. calls: None where there are none."""

    calls: ToolUse | None = None
    reasoning: bool = False

    def parser(self, *, thinking: bool) -> Parser | None:
        """Of one answer; None where its text is all there is. thinking: the prompt has begun the thoughts."""
        parsers: list[Parser] = [ReasoningParser(opened=thinking)] if self.reasoning else []
        if self.calls is not None:
            parsers.append(CallParser(self.calls.call_format, self.calls.tools))
        return _Chain(parsers) if parsers else None


NO_FORMATS, PLAIN_TEXT = AnswerFormats(), AnswerReading()


def choose_formats(tool_call_parser: str, reasoning_parser: str, template: str) -> AnswerFormats:
    """By the settings of these names; auto: by the words of the chat template."""
    if tool_call_parser == AUTO:
        tool_call_parser = QWEN3_CODER.name if QWEN3_CODER.tags[-1] in template else HERMES.name
    thinks = THINK in template if reasoning_parser == AUTO else reasoning_parser != NONE
    return AnswerFormats(calls=CALL_FORMATS[tool_call_parser], reasoning=thinks)


class _Chain:
    """Parsers, each of which splits the text that the one before it leaves."""

    def __init__(self, parsers: Sequence[Parser]) -> None:
        self._parsers = parsers

    def feed(self, text: str, *, final: bool = False) -> list[Piece]:
        pieces: list[Piece] = [Text(text)]
        for parser in self._parsers:
            split = (parser.feed(piece.text) if isinstance(piece, Text) else [piece] for piece in pieces)
            pieces = [*chain.from_iterable(split), *(parser.feed("", final=True) if final else ())]
        return joined(pieces)
