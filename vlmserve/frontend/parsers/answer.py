"""The formats of calls and thoughts that a model writes, and the parser of one answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from vlmserve.frontend.parsers.calls import (
    CallFormat,
    CallParser,
    Parser,
    Piece,
    Reasoning,
    Text,
    ToolUse,
    begun_tag,
    could_begin,
    joined,
)
from vlmserve.frontend.parsers.hermes import HERMES
from vlmserve.frontend.parsers.qwen3_coder import QWEN3_CODER
from vlmserve.ipc.messages import THINK_END

OPEN, CLOSE = "<think>", THINK_END


def opened_in_prompt(prompt: str) -> bool:
    """Return whether a rendered prompt leaves the model within its thoughts: the last turn, which is the model's, is
    open, and so is a <think> in it."""
    last = prompt.rpartition("<|im_start|>")[2]
    return "<|im_end|>" not in last and last.rfind(OPEN) > last.rfind(CLOSE)


class ReasoningParser:
    """Thoughts that begin the answer, or (opened) were begun by the prompt. If they never end, the whole answer is
    thoughts.

    Line breaks around thoughts are left out: templates write them around those that are sent back.
    """

    def __init__(self, *, opened: bool) -> None:
        self._read = self._thoughts if opened else self._start
        self._buffer = ""
        self._blank = True  # so far, in the thoughts or the answer, whichever is read now

    def feed(self, text: str, *, final: bool = False) -> list[Piece]:
        """Read on; see `Parser`."""
        self._buffer += text
        return self._read(final)

    def _start(self, final: bool) -> list[Piece]:
        begun = self._buffer.lstrip()
        if begun.startswith(OPEN):
            self._buffer = begun[len(OPEN) :]
            self._read = self._thoughts
            return self._read(final)
        if could_begin(begun, OPEN) and not final:
            return []
        self._blank = False
        self._read = self._answer
        return self._read(final)

    def _thoughts(self, final: bool) -> list[Piece]:
        self._drop_line_breaks()
        thoughts, close, rest = self._buffer.partition(CLOSE)
        if close:
            self._buffer, self._blank, self._read = rest, True, self._answer
            return [Reasoning(thoughts.rstrip("\n")), *self._read(final)]
        keep = 0 if final else begun_tag(thoughts, (CLOSE,))
        certain = thoughts[: len(thoughts) - keep].rstrip("\n")
        self._buffer = "" if final else thoughts[len(certain) :]
        return [Reasoning(certain)]

    def _answer(self, final: bool) -> list[Piece]:
        self._drop_line_breaks()
        text, self._buffer = self._buffer, ""
        return [Text(text)]

    def _drop_line_breaks(self) -> None:
        """Drop line breaks at the beginning."""
        if self._blank:
            self._buffer = self._buffer.lstrip("\n")
            self._blank = not self._buffer


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
            calls = self.calls
            parsers.append(CallParser(calls.call_format, calls.tools, only_calls=calls.required))
        return _Chain(parsers) if parsers else None


NO_FORMATS, PLAIN_TEXT = AnswerFormats(), AnswerReading()


def choose_formats(tool_call_parser: str, reasoning_parser: str, template: str) -> AnswerFormats:
    """Choose formats by the settings of these names; auto goes by the words of the chat template."""
    if tool_call_parser == AUTO:
        tool_call_parser = QWEN3_CODER.name if QWEN3_CODER.tags[-1] in template else HERMES.name
    thinks = OPEN in template if reasoning_parser == AUTO else reasoning_parser != NONE
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
