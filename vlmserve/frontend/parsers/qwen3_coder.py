"""Calls of Qwen3-Coder and Qwen3.5: <tool_call><function=NAME><parameter=KEY>value</parameter></function>.

Arguments come as bare text. They become JSON of the types that the function's schema has for them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vlmserve.frontend.parsers.calls import (
    CallArguments,
    CallBegin,
    CallFormat,
    CallReader,
    Piece,
    State,
    Tool,
    begun_tag,
    could_begin,
)

STRING = frozenset(("string",))
_PYTHONS = {"True": "true", "False": "false", "None": "null"}
_ALTERNATIVES = ("anyOf", "oneOf", "allOf")
_KINDS = {"properties": "object", "items": "array"}
_DEEPEST = 16  # references and alternatives within each other


def types_of(tools: Sequence[Tool], function: str, parameter: str) -> frozenset[str]:
    """Return JSON Schema's names of the types that a parameter may have; a string if the schema says nothing."""
    parts = _parts(*_schema_of(tools, function, parameter), past_types=False)
    return frozenset().union(*map(_own_types, parts)) or STRING


def is_picked(tools: Sequence[Tool], function: str, parameter: str) -> bool:
    """Return whether a parameter has fixed values or a pattern: then blanks around it do not belong to it."""
    parts = _parts(*_schema_of(tools, function, parameter), past_types=True)
    return any(word in part for part in parts for word in ("enum", "const", "pattern", "format"))


def to_json(text: str, types: frozenset[str]) -> str:
    """Return the text as a JSON value of one of the types, or else as a string, whatever the types say."""
    if types != STRING:
        bare = text.strip()
        bare = _PYTHONS.get(bare, bare)
        try:
            value = json.loads(bare, parse_constant=_refuse)
        except (ValueError, RecursionError):
            pass
        else:
            if _type_names(value) & types:
                return bare
    return json.dumps(text, ensure_ascii=False)


def _schema_of(tools: Sequence[Tool], function: str, parameter: str) -> tuple[Any, Mapping[str, Any]]:
    """Return a parameter's schema, and the schema that it stands in."""
    for tool in tools:
        if tool["function"]["name"] == function:
            root = tool["function"].get("parameters") or {}
            properties = root.get("properties")
            return properties.get(parameter) if isinstance(properties, Mapping) else None, root
    return None, {}


def _parts(
    schema: Any, root: Mapping[str, Any], *, past_types: bool, depth: int = _DEEPEST
) -> Iterator[Mapping[str, Any]]:
    """Yield a schema and those that it refers to or chooses from. past_types: go on behind one that names its type."""
    if not isinstance(schema, Mapping) or depth == 0:
        return
    yield schema
    if isinstance(schema.get("type"), str | list) and not past_types:
        return
    parts = [_resolve(schema["$ref"], root)] if isinstance(schema.get("$ref"), str) else []
    for word in _ALTERNATIVES:
        parts += schema[word] if isinstance(schema.get(word), list) else []
    for part in parts:
        yield from _parts(part, root, past_types=past_types, depth=depth - 1)


def _own_types(schema: Mapping[str, Any]) -> frozenset[str]:
    said = schema.get("type")
    if isinstance(said, str | list):
        return frozenset(name for name in ([said] if isinstance(said, str) else said) if isinstance(name, str))
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    found = {name for value in values for name in _type_names(value)} if isinstance(values, list) else set()
    return frozenset(found | {kind for word, kind in _KINDS.items() if word in schema})


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """Follow a reference within the schema, such as #/$defs/Point."""
    at: Any = root
    for name in reference.removeprefix("#/").split("/"):
        at = at.get(name) if isinstance(at, Mapping) else None
    return at


def _type_names(value: Any) -> frozenset[str]:
    match value:
        case None:
            return frozenset(("null",))
        case bool():
            return frozenset(("boolean",))
        case int():
            return frozenset(("integer", "number"))
        case float():
            return frozenset(("number", "integer") if value.is_integer() else ("number",))
        case str():
            return STRING
        case list():
            return frozenset(("array",))
    return frozenset(("object",))


def _refuse(constant: str) -> Any:
    """Refuse NaN and infinities, which JSON does not have."""
    raise ValueError(constant)


OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_CLOSE = "<function=", "</function>"
PARAMETER, PARAMETER_CLOSE = "<parameter=", "</parameter>"
_LONGEST_NAME = 256
_NAME = re.compile(rf"([^<>\n]{{1,{_LONGEST_NAME}}})>")


class _Qwen3CoderReader(CallReader):
    """Passes strings on as they come, other values once complete. The models forget the outermost tag at times: then
    <function= opens the call."""

    def __init__(self, tag: str, index: int, tools: Sequence[Tool]) -> None:
        super().__init__(index, self._function if tag == FUNCTION else self._head)
        self._tools = tools
        self._name = ""
        self._parameters = 0
        self._types = STRING
        self._is_picked = False
        self._value_begun = False

    def _head(self, text: str, pieces: list[Piece], final: bool) -> int | None:
        begun = text.lstrip()
        if begun.startswith(FUNCTION):
            # taken together with the name: a refused call must still have its text
            blank = len(text) - len(begun) + len(FUNCTION)
            took = self._function(text[blank:], pieces, final)
            return None if took is None else blank + took
        if final or not could_begin(begun, FUNCTION):
            self.state = State.REFUSED
        return None

    def _function(self, text: str, pieces: list[Piece], final: bool) -> int | None:
        name = _NAME.match(text)
        if name is not None:
            self._name = name.group(1).strip()
            self._read = self._between
            pieces.append(CallBegin(self._index, self._name))
            return name.end()
        if final or len(text) > _LONGEST_NAME or re.search(r"[<>\n]", text):
            self.state = State.REFUSED
        return None

    def _between(self, text: str, pieces: list[Piece], final: bool) -> int | None:
        """Read on to a parameter or the end of the function. Anything else ends the call, and is text again."""
        begun = text.lstrip()
        blank = len(text) - len(begun)
        if begun.startswith(PARAMETER):
            key = _NAME.match(begun, len(PARAMETER))
            if key is not None:
                return blank + self._begin_parameter(key, pieces)
            cut = len(begun) <= len(PARAMETER) + _LONGEST_NAME and not re.search(r"[<>\n]", begun[1:])
        else:
            cut = any(could_begin(begun, tag) for tag in (PARAMETER, FUNCTION_CLOSE, CLOSE))
        if cut:
            self.state = State.CLOSED if final else State.OPEN  # its arguments are cut where the answer is
            return len(text) if final else None
        self._say("}" if self._parameters else "{}", pieces)
        if begun.startswith(FUNCTION_CLOSE):
            self._read = self._tail
            return blank + len(FUNCTION_CLOSE)
        self.state = State.CLOSED
        return blank + len(CLOSE) if begun.startswith(CLOSE) else 0

    def _begin_parameter(self, key: re.Match[str], pieces: list[Piece]) -> int:
        name = key.group(1).strip()
        self._types = types_of(self._tools, self._name, name)
        self._value_begun = False
        self._is_picked = is_picked(self._tools, self._name, name)
        is_text = self._types == STRING and not self._is_picked
        self._read = self._string if is_text else self._value
        before = ", " if self._parameters else "{"
        quote = '"' if is_text else ""
        self._say(f"{before}{json.dumps(name, ensure_ascii=False)}: {quote}", pieces)
        self._parameters += 1
        return key.end()

    def _string(self, text: str, pieces: list[Piece], final: bool) -> int | None:
        if not self._value_begun and (text or final):
            self._value_begun = True
            return len(text) - len(text.removeprefix("\n"))
        value, close, _ = text.partition(PARAMETER_CLOSE)
        if close:
            self._say(_escaped(value.removesuffix("\n")) + '"', pieces)
            self._read = self._between
            return len(value) + len(close)
        if final:
            self.state = State.CLOSED
        else:
            value = value[: len(value) - begun_tag(value, (PARAMETER_CLOSE, "\n" + PARAMETER_CLOSE))]
        self._say(_escaped(value), pieces)
        return len(value) or None

    def _value(self, text: str, pieces: list[Piece], final: bool) -> int | None:
        value, close, _ = text.partition(PARAMETER_CLOSE)
        length = len(value)
        if close:
            value = value.strip() if self._is_picked else value.removeprefix("\n").removesuffix("\n")
            self._say(to_json(value, self._types), pieces)
            self._read = self._between
            return length + len(close)
        if final:
            self.state = State.CLOSED
            self._say(value.strip(), pieces)
            return len(value)
        return None

    def _tail(self, text: str, pieces: list[Piece], final: bool) -> int | None:
        begun = text.lstrip()
        if could_begin(begun, CLOSE) and not final:
            return None
        self.state = State.CLOSED
        cut = could_begin(begun, CLOSE)
        return len(text) if cut else len(text) - len(begun) + len(CLOSE) if begun.startswith(CLOSE) else 0

    def _say(self, text: str, pieces: list[Piece]) -> None:
        pieces.append(CallArguments(self._index, text))


def _escaped(text: str) -> str:
    """Escape a text for a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _wrap(name: str) -> tuple[str, str]:
    return f"{OPEN}\n{FUNCTION}{name}>\n", f"{FUNCTION_CLOSE}\n{CLOSE}"


QWEN3_CODER = CallFormat(
    name="qwen3_coder", tags=(OPEN, FUNCTION), reader=_Qwen3CoderReader, wrap=_wrap, style="qwen_xml"
)
