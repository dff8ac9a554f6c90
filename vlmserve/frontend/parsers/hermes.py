"""Hermes' calls, which most Qwen models write: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from vlmserve.frontend.parsers.calls import (
    CallArguments,
    CallBegin,
    CallFormat,
    CallReader,
    Piece,
    State,
    Tool,
    could_begin,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"
# The usual order of the fields: arguments can be passed on as they come.
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\<\n]+)"\s*,\s*"arguments"\s*:\s*(?=\{)')
_TAIL = re.compile(r"\s*\}?\s*")
_IN_STRING = re.compile(r'["\\]')
_IN_VALUE = re.compile(r'[{}\[\]"<]')


class _HermesReader(CallReader):
    def __init__(self, tag: str, index: int, tools: Sequence[Tool]) -> None:
        super().__init__(index, self._head)
        # of the arguments: open brackets; whether this is within a string, and behind a backslash
        self._depth = 0
        self._in_string = self._escaped = False

    def _head(self, text: str, pieces: list[Piece], final: bool) -> int | None:
        head = _HEAD.match(text)
        if head is not None:
            pieces.append(CallBegin(self._index, head.group(1)))
            self._read = self._arguments
            return head.end()
        if text.lstrip()[:1] not in ("", "{"):
            self.state = State.REFUSED
            return None
        body, close, _ = text.partition(CLOSE)
        if not close and not final:
            return None
        call = _whole_call(body)
        if call is None:
            self.state = State.REFUSED
            return None
        name, arguments = call
        pieces += CallBegin(self._index, name), CallArguments(self._index, arguments)
        self.state = State.CLOSED
        return len(body) + len(close)

    def _arguments(self, text: str, pieces: list[Piece], final: bool) -> int | None:
        if not text:
            self.state = State.CLOSED if final else State.OPEN
            return None
        end = self._end_of_value(text)
        if end is not None:
            self._read = self._tail
        pieces.append(CallArguments(self._index, text[:end]))
        return len(text) if end is None else end

    def _end_of_value(self, text: str) -> int | None:
        """Return where the arguments end in their next part: behind their last bracket, or before a tag within them,
        which no JSON has there."""
        at = int(self._escaped)
        self._escaped = False
        while at < len(text):
            found = (_IN_STRING if self._in_string else _IN_VALUE).search(text, at)
            if found is None:
                return None
            mark, at = found.group(), found.end()
            if mark == '"':
                self._in_string = not self._in_string
            elif mark == "\\":
                self._escaped = at == len(text)
                at += 1
            elif mark == "<":
                return found.start()
            else:
                self._depth += 1 if mark in "{[" else -1
                if self._depth == 0:
                    return at
        return None

    def _tail(self, text: str, pieces: list[Piece], final: bool) -> int | None:
        """Read the end of the call: a brace and a tag. Further fields are passed over; anything else is text again."""
        blank = _TAIL.match(text)
        assert blank is not None
        rest = text[blank.end() :]
        if could_begin(rest, CLOSE):
            self.state = State.CLOSED if final else State.OPEN
            return len(text) if final else None
        self.state = State.CLOSED
        if rest.startswith(CLOSE):
            return blank.end() + len(CLOSE)
        if rest.startswith(",") and "}" not in blank.group():
            body, close, _ = rest.partition(CLOSE)
            if not close and not final:
                self.state = State.OPEN
                return None
            if close and _json('{"":0' + body) is not None:
                return blank.end() + len(body) + len(close)
        return blank.end()


def _whole_call(body: str) -> tuple[str, str] | None:
    """Return name and arguments of a call whose fields stand in another order, or whose arguments are text or left
    out."""
    call = _json(body)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        arguments = _json(arguments)
    if arguments is None:
        arguments = {}
    return (call["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _json(text: str) -> Any:
    """Parse JSON; None for a text that is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _wrap(name: str) -> tuple[str, str]:
    return f'{OPEN}\n{{"name": "{name}", "arguments": ', f"}}\n{CLOSE}"


HERMES = CallFormat(name="hermes", tags=(OPEN,), reader=_HermesReader, wrap=_wrap, style="json")
