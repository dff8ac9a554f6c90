"""Return whether a JSON schema can be followed to the letter.

xgrammar reads past keywords that it does not know. An answer would then not be what the schema says, without a word, so
they are refused here, with the place. Schemas that xgrammar itself refuses or warns about are left to it (see
`grammar.compiling`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from vlmserve_common.errors import VlmserveError

MAX_DEPTH = 64
"""Schemas inside one another."""

_TYPES = {"string", "number", "integer", "boolean", "null", "array", "object"}
_UNKNOWN = (
    *("uniqueItems", "contains", "minContains", "maxContains", "additionalItems", "unevaluatedItems"),
    *("dependentRequired", "dependentSchemas", "dependencies", "not", "if", "then", "else"),
    *("$dynamicRef", "$recursiveRef", "contentEncoding", "contentMediaType", "contentSchema"),
)
_ANNOTATIONS = frozenset(
    (
        *("title", "description", "default", "examples", "example", "$comment", "deprecated", "readOnly", "writeOnly"),
        *("$defs", "definitions", "$schema", "$id", "discriminator", "nullable"),
    )
)
_WHOLE = ("$ref", "const", "enum", "anyOf", "oneOf", "allOf")
"""xgrammar reads nothing beside one of these keywords."""

_ONE_SCHEMA = ("items", "additionalProperties", "propertyNames", "unevaluatedProperties")
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_LENGTHS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_SHAPES: Mapping[str, tuple[type | tuple[type, ...], str]] = {
    **dict.fromkeys(_SCHEMAS_BY_NAME, (dict, "an object of schemas")),
    **dict.fromkeys(_SCHEMA_LISTS, (list, "a list of schemas")),
    **dict.fromkeys(_LENGTHS, (int, "a whole number")),
    **dict.fromkeys(_LIMITS, ((int, float), "a number")),
    **dict.fromkeys(("$ref", "pattern", "format"), (str, "text")),
    "enum": (list, "a list of values"),
    "required": (list, "a list of names"),
}
"""Keyword -> the types of its value, and their words."""


class SchemaError(VlmserveError):
    """The fault of a schema, with its place: #/properties/name."""


def check_schema(root: Any) -> None:
    """Raise SchemaError if the value is no schema, if no answer fits it, or if it asks for something unsupported."""
    todo: list[tuple[str, int, Any]] = [("#", 1, root)]
    while todo:
        place, depth, schema = todo.pop()
        if depth > MAX_DEPTH:
            raise SchemaError(f"at {place[:200]} it is {depth} schemas deep; the limit is {MAX_DEPTH}")
        if isinstance(schema, bool):
            continue
        if not isinstance(schema, dict):
            raise SchemaError(f"at {place} there is {_name(schema)} in place of a schema")
        _check_keywords(place, schema, root)
        todo += [(where, depth + 1, inner) for where, inner in _inside(place, schema)]


def _inside(place: str, schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in _ONE_SCHEMA:
        if key in schema:
            yield f"{place}/{key}", schema[key]
    for key in _SCHEMAS_BY_NAME:
        if key in schema:
            yield from ((f"{place}/{key}/{_escaped(name)}", inner) for name, inner in schema[key].items())
    for key in _SCHEMA_LISTS:
        if key in schema:
            yield from ((f"{place}/{key}/{index}", inner) for index, inner in enumerate(schema[key]))


def _check_keywords(place: str, schema: dict[str, Any], root: Any) -> None:
    for key in _UNKNOWN:
        if schema.get(key) not in (None, False):
            raise SchemaError(f"{key} at {place} is not supported")
    _check_shapes(place, schema)
    whole = [key for key in _WHOLE if key in schema]
    beside = set(schema) - _ANNOTATIONS - set(whole[:1]) - {"type"}
    if whole and beside:
        raise SchemaError(f"{whole[0]} at {place} is not supported together with {', '.join(sorted(beside))}")
    if len(schema.get("allOf", ())) > 1:
        raise SchemaError(f"allOf of several schemas at {place} is not supported: write them as one")
    if "$ref" in schema:
        _follow(place, schema["$ref"], root)
    missing = set(schema.get("required", ())) - set(schema.get("properties", ()))
    if missing:
        raise SchemaError(f"required at {place} names {_shown(missing)}, which properties lacks")
    values = schema["enum"] if "enum" in schema else [schema["const"]] if "const" in schema else []
    for value in values:
        if "type" in schema and not _has_type(value, schema["type"]):
            raise SchemaError(f"{_name(value)} among the values at {place} is not of type {schema['type']}")


def _check_shapes(place: str, schema: dict[str, Any]) -> None:
    for key, (kind, words) in _SHAPES.items():
        if key in schema and (isinstance(schema[key], bool) or not isinstance(schema[key], kind)):
            raise SchemaError(f"{key} at {place} is {_name(schema[key])}; it must be {words}")
    for key in (*_SCHEMA_LISTS, "enum"):
        if key in schema and not schema[key]:
            raise SchemaError(f"{key} at {place} is empty: no answer fits")
    if not all(isinstance(name, str) for name in schema.get("required", ())):
        raise SchemaError(f"required at {place} must be a list of names")
    for name in _listed(schema.get("type", [])):
        if not isinstance(name, str) or name not in _TYPES:
            raise SchemaError(f"type at {place} is {_name(name)}; it must be one of {', '.join(sorted(_TYPES))}")


def _follow(place: str, ref: str, root: Any) -> None:
    """Raise SchemaError for a reference that leads nowhere, or only to itself."""
    seen: set[str] = set()
    while ref not in seen:
        seen.add(ref)
        target = _find(place, ref, root)
        if not isinstance(target, dict) or not isinstance(target.get("$ref"), str):
            return
        ref = target["$ref"]
    raise SchemaError(f"$ref at {place} leads to itself: no answer fits")


def _find(place: str, ref: str, root: Any) -> Any:
    if ref != "#" and not ref.startswith("#/"):
        raise SchemaError(f"$ref at {place} is {_name(ref)}; it must begin with #/, for a place in the schema")
    target = root
    for part in ref.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(target, dict) or name not in target:
            raise SchemaError(f"$ref at {place} is {_name(ref)}, and there is no such place in the schema")
        target = target[name]
    return target


def _has_type(value: Any, types: Any) -> bool:
    kinds = _listed(types)
    if isinstance(value, bool):
        return "boolean" in kinds
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer" in kinds or "number" in kinds
    names = {str: "string", float: "number", type(None): "null", list: "array", dict: "object"}
    return names[type(value)] in kinds


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")[:80]


def _shown(names: set[str]) -> str:
    return ", ".join(_name(name) for name in sorted(names)[:5])


def _name(value: Any) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
