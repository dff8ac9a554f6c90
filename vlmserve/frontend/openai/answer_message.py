"""OpenAI's message of an answer, whole and in deltas, made of the pieces that the parsers find."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any

from vlmserve.frontend.parsers.answer import AnswerReading
from vlmserve.frontend.parsers.pieces import CallArguments, CallBegin, Piece, Reasoning, Text


def delta_of(piece: Piece) -> dict[str, Any]:
    """Return the delta that a stream's chunk has for a piece."""
    match piece:
        case Text():
            return {"content": piece.text}
        case Reasoning():
            return {"reasoning_content": piece.text}
        case CallBegin():
            function = {"name": piece.name, "arguments": ""}
            call = {"index": piece.index, "id": f"call_{secrets.token_hex(12)}", "type": "function"}
            return {"tool_calls": [{**call, "function": function}]}
        case CallArguments():
            return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}


def message_of(pieces: Iterable[Piece]) -> dict[str, Any]:
    """Return the whole message: the sum of its deltas."""
    content, reasoning = "", ""
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        match piece:
            case Text():
                content += piece.text
            case Reasoning():
                reasoning += piece.text
            case CallBegin():
                [call] = delta_of(piece)["tool_calls"]
                calls.append({key: value for key, value in call.items() if key != "index"})
            case CallArguments():
                calls[piece.index]["function"]["arguments"] += piece.text
    return {
        "role": "assistant",
        "content": content or (None if calls else ""),
        "refusal": None,
        **({"reasoning_content": reasoning} if reasoning else {}),
        **({"tool_calls": calls} if calls else {}),
    }


class ThoughtTokens:
    """Counts the tokens of one choice's thoughts and of their tags. opened, closed: the ids of these tags. thinking:
    the prompt has begun the thoughts."""

    def __init__(self, opened: int | None, closed: int | None, *, thinking: bool) -> None:
        self.count = 0
        self._opened = opened
        self._closed = closed
        self._thinking = thinking

    def add(self, ids: Sequence[int]) -> None:
        """Count the next tokens."""
        for token in ids:
            self._thinking |= token == self._opened
            self.count += self._thinking
            self._thinking &= token != self._closed


class ChoiceText:
    """Reads one choice's text. thinking: the prompt has begun the thoughts. called: the text calls a tool. If the
    request allows one call only, later calls are left out, with a warning."""

    def __init__(self, reading: AnswerReading, *, thinking: bool) -> None:
        self.called = False
        self.warning = ""
        self._parser = reading.parser(thinking=thinking)
        self._only_one = reading.calls is not None and not reading.calls.parallel

    def feed(self, text: str, *, final: bool) -> list[Piece]:
        """Return the pieces that are certain by now. final: this text is the last one."""
        if self._parser is None:
            return [Text(text)] if text else []
        return [piece for piece in self._parser.feed(text, final=final) if self._is_wanted(piece)]

    def _is_wanted(self, piece: Piece) -> bool:
        if not isinstance(piece, CallBegin | CallArguments):
            return True
        self.called = True
        if piece.index == 0 or not self._only_one:
            return True
        self.warning = "the model called more than one tool; with parallel_tool_calls: false the answer has the first"
        return False
