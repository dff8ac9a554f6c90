"""Arguments that come as bare text, as JSON of the types that a function's schema has for them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from vlmserve.frontend.parsers.calls import Tool

STRING = frozenset(("string",))
_PYTHONS = {"True": "true", "False": "false", "None": "null"}
_ALTERNATIVES = ("anyOf", "oneOf", "allOf")
_DEEPEST = 16  # references and alternatives within each other


def types_of(tools: Sequence[Tool], function: str, parameter: str) -> frozenset[str]:
    """JSON Schema's names of the types that a parameter may have; a string where nothing is said."""
    schema, root = _schema_of(tools, function, parameter)
    return _types(schema, root, _DEEPEST) or STRING


def is_picked(tools: Sequence[Tool], function: str, parameter: str) -> bool:
    """Whether a parameter is one of some values, or of a pattern: blanks around it are no part of it then."""
    schema, root = _schema_of(tools, function, parameter)
    return _is_picked(schema, root, _DEEPEST)


def to_json(text: str, types: frozenset[str]) -> str:
    """A JSON value of one of the types if the text is one; else it is a string, whatever the types say."""
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
    """With the one that it stands in."""
    for tool in tools:
        if tool["function"]["name"] == function:
            root = tool["function"].get("parameters") or {}
            properties = root.get("properties")
            return properties.get(parameter) if isinstance(properties, Mapping) else None, root
    return None, {}


def _is_picked(schema: Any, root: Mapping[str, Any], depth: int) -> bool:
    if not isinstance(schema, Mapping) or depth == 0:
        return False
    if any(word in schema for word in ("enum", "const", "pattern", "format")):
        return True
    parts = [_resolve(schema["$ref"], root)] if isinstance(schema.get("$ref"), str) else []
    for word in _ALTERNATIVES:
        parts += schema[word] if isinstance(schema.get(word), list) else []
    return any(_is_picked(part, root, depth - 1) for part in parts)


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or depth == 0:
        return frozenset()
    said = schema.get("type")
    if isinstance(said, str):
        return frozenset((said,))
    if isinstance(said, list):
        return frozenset(name for name in said if isinstance(name, str))
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    found = {name for value in values for name in _type_names(value)} if isinstance(values, list) else set()
    if isinstance(schema.get("$ref"), str):
        found |= _types(_resolve(schema["$ref"], root), root, depth - 1)
    for word in _ALTERNATIVES:
        if isinstance(schema.get(word), list):
            found |= {name for part in schema[word] for name in _types(part, root, depth - 1)}
    if "properties" in schema:
        found.add("object")
    if "items" in schema:
        found.add("array")
    return frozenset(found)


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """Of references within the schema, such as #/$defs/Point."""
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
    """NaN and infinities are no JSON."""
    raise ValueError(constant)
