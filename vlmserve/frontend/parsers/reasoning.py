"""Thoughts between <think> and </think>, at the beginning of an answer."""

from __future__ import annotations

from vlmserve.frontend.parsers.pieces import Piece, Reasoning, Text, begun_tag, could_begin
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
