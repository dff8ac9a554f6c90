"""The form that a request asks of its answers, in the fields of OpenAI, vLLM and SGLang: read, checked, and joined with
the calls of tools into one `GrammarSpec`.

xgrammar reads past keywords of JSON schemas that it does not know. An answer would then not be what the schema says,
without a word, so they are refused here, with the place, unless the client asks for no strictness. Schemas that
xgrammar itself refuses or warns about are left to it (see `grammar.serving`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from vlmserve.frontend.parsers.calls import ToolUse, call_grammar, only_calls
from vlmserve.ipc.messages import GrammarSpec
from vlmserve_common.errors import BadRequestError, VlmserveError

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


def check_schema(root: Any, *, strict: bool = True) -> list[str]:
    """Raise SchemaError if the value is no schema, if no answer fits it, or if it asks for something unsupported.

    strict: False returns the places of keywords that have no effect, in place of the error.
    """
    ignored: list[str] = []
    todo: list[tuple[str, int, Any]] = [("#", 1, root)]
    while todo:
        place, depth, schema = todo.pop()
        if depth > MAX_DEPTH:
            raise SchemaError(f"at {place[:200]} it is {depth} schemas deep; the limit is {MAX_DEPTH}")
        if isinstance(schema, bool):
            continue
        if not isinstance(schema, dict):
            raise SchemaError(f"at {place} there is {_name(schema)} in place of a schema")
        unknown = [key for key in _UNKNOWN if schema.get(key) not in (None, False)]
        if unknown and strict:
            raise SchemaError(f"{unknown[0]} at {place} is not supported")
        ignored += [f"{key} at {place}" for key in unknown]
        _check_keywords(place, {key: value for key, value in schema.items() if key not in unknown}, root)
        todo += [(where, depth + 1, inner) for where, inner in _inside(place, schema)]
    return ignored


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


Kind: TypeAlias = Literal["json_schema", "regex", "ebnf", "choice", "structural_tag"]

_FIELDS: dict[str, Kind] = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "ebnf",
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "ebnf",
}
"""vLLM's older fields, and SGLang's."""
FORM_FIELDS = ("response_format", "structured_outputs", *_FIELDS)

_STRUCTURED_OUTPUTS: dict[str, Kind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
    "structural_tag": "structural_tag",
}
_ANY_OBJECT = '{"type": "object"}'


def grammar_of(given: Mapping[str, Any]) -> GrammarSpec | None:
    """Read the form from a request's fields, by their names; None for a field left out. Raises BadRequestError for two
    forms at once, and for a value of another shape."""
    found = [spec for spec in _specs(given) if spec is not None]
    if len(found) > 1:
        names = " and ".join(spec.param for spec in found[:2])
        raise _refusal(found[1].param, f"{names} both say what the answer must look like: give one")
    return found[0] if found else None


def _specs(given: Mapping[str, Any]) -> Iterator[GrammarSpec | None]:
    yield _of_response_format(given.get("response_format"))
    yield from _of_structured_outputs(given.get("structured_outputs"))
    for name, kind in _FIELDS.items():
        if given.get(name) is not None:
            yield make_spec(kind, given[name], param=name)


def make_spec(kind: Kind, value: Any, *, param: str, strict: bool = True) -> GrammarSpec:
    """Make a spec of a field's value: a text; a JSON schema or structural tag may also be an object; choices are a
    list."""
    if kind == "choice":
        if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(v, str) for v in value):
            raise _refusal(param, f"{param} must be a list of texts")
        text = json.dumps(list(value))
    elif isinstance(value, str):
        text = value
    elif kind in ("json_schema", "structural_tag") and isinstance(value, Mapping | bool):
        text = _as_json(value, param)
    else:
        raise _refusal(param, f"{param} must be {'text or an object' if kind == 'json_schema' else 'text'}")
    return GrammarSpec(kind=kind, text=text, strict=strict, param=param)


def _of_response_format(given: Any) -> GrammarSpec | None:
    if given is None:
        return None
    name, kind = "response_format", given.get("type") if isinstance(given, Mapping) else None
    match kind:
        case "text":
            return None
        case "json_object":
            return GrammarSpec(kind="json_schema", text=_ANY_OBJECT, param=name)
        case "json_schema":
            inner = given.get("json_schema")
            schema = inner.get("schema") if isinstance(inner, Mapping) else None
            if schema is None:
                raise _refusal(f"{name}.json_schema", f"{name} of type json_schema needs json_schema.schema")
            strict = inner.get("strict") is not False
            return make_spec("json_schema", schema, param=f"{name}.json_schema.schema", strict=strict)
        case "structural_tag":
            return make_spec("structural_tag", given, param=name)
    raise _refusal(name, f"{name} has the type {kind!r}; it must be text, json_object, json_schema or structural_tag")


def _of_structured_outputs(given: Any) -> Iterator[GrammarSpec | None]:
    name = "structured_outputs"
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise _refusal(name, f"{name} must be an object")
    for key, value in given.items():
        if value is None or (key == "json_object" and value is False):
            continue
        if key == "json_object":
            yield GrammarSpec(kind="json_schema", text=_ANY_OBJECT, param=f"{name}.{key}")
        elif key in _STRUCTURED_OUTPUTS:
            yield make_spec(_STRUCTURED_OUTPUTS[key], value, param=f"{name}.{key}")
        else:
            known = ", ".join([*_STRUCTURED_OUTPUTS, "json_object"])
            raise _refusal(f"{name}.{key}", f"{name} has no {key!r}, only: {known}")


def _as_json(value: Any, param: str) -> str:
    """Write JSON with keys in their order, which is the order of an answer's properties."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise _refusal(param, f"{param} is not JSON: {error}") from None


def _refusal(param: str, message: str) -> BadRequestError:
    return BadRequestError(message, param=param, code="invalid_value")


MAX_GRAMMAR_BYTES = 128 * 1024
MAX_CHOICES = 1024
_MOST_WARNINGS = 16


def verify_grammar(spec: GrammarSpec) -> tuple[str, ...]:
    """Return warnings about parts without effect. Raise BadRequestError for a grammar that is too large or malformed.
    Only the engine finds out whether it compiles."""
    size = len(spec.text.encode("utf-8", "surrogatepass"))
    if size > MAX_GRAMMAR_BYTES:
        raise _unfit(spec, f"has {size} bytes; the limit is {MAX_GRAMMAR_BYTES}")
    if not spec.text.strip():
        raise _unfit(spec, "is empty")
    if not _is_text(spec.text):
        raise _unfit(spec, "has a NUL or half a surrogate pair, which no text has")
    if spec.kind == "json_schema":
        ignored = _check_schema(_parsed(spec), spec.param, strict=spec.strict)
        return tuple(f"{spec.param} is not strict: {what} has no effect" for what in ignored[:_MOST_WARNINGS])
    elif spec.kind == "choice":
        _check_choices(spec, json.loads(spec.text))
    elif spec.kind == "structural_tag":
        _parsed(spec)
    return ()


def _check_schema(schema: object, param: str, why: str = "", *, strict: bool = True) -> list[str]:
    try:
        return check_schema(schema, strict=strict)
    except SchemaError as error:
        what = f"{param} is a JSON schema that cannot be followed{why}: {error}"
        raise BadRequestError(what, param=param, code="invalid_grammar") from None


def _check_choices(spec: GrammarSpec, choices: list[str]) -> None:
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise _unfit(spec, f"has {len(choices)} choices; it must have 1 to {MAX_CHOICES}")
    for index, choice in enumerate(choices):
        if not choice:
            raise _unfit(spec, f"has an empty text as choice {index}")
        if not _is_text(choice):
            raise _unfit(spec, f"has a NUL or half a surrogate pair in choice {index}, which no text has")


def _parsed(spec: GrammarSpec) -> Any:
    try:
        return json.loads(spec.text)
    except RecursionError:
        raise _unfit(spec, f"is nested too deep; the limit is {MAX_DEPTH}") from None
    except ValueError as error:
        raise _unfit(spec, f"is not JSON: {error}") from None


def _is_text(text: str) -> bool:
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def _unfit(spec: GrammarSpec, what: str) -> BadRequestError:
    return BadRequestError(f"{spec.param} {what}", param=spec.param, code="invalid_grammar")


def chat_grammar(form: GrammarSpec | None, use: ToolUse | None, *, thinking: bool) -> GrammarSpec | None:
    """Return the grammar of an answer; None if any text will do. Raises BadRequestError if form and calls must both be
    the answer, and for strict tools whose schema cannot be followed.

    form: asked for by the request. use: how answers may use tools. thinking: the prompt has begun the model's thoughts.
    """
    grammar = form if use is None else _with_calls(form, use)
    return replace(grammar, thinking=True) if grammar is not None and thinking else grammar


def _with_calls(form: GrammarSpec | None, use: ToolUse) -> GrammarSpec | None:
    if form is not None and use.required:
        raise BadRequestError(
            f"{form.param} and a tool_choice that requires a call exclude each other",
            param="tool_choice",
            code="invalid_value",
        )
    strict = [index for index, tool in enumerate(use.tools) if tool["function"].get("strict")]
    for index in strict:
        schema = use.tools[index]["function"].get("parameters", {})
        _check_schema(schema, f"tools[{index}].function.parameters", ", and the tool is strict")
    tag = call_grammar(use) if form is None else only_calls(use)
    if tag is None:
        return None
    calls = make_spec("structural_tag", tag, param="tools", strict=bool(strict))
    verify_grammar(calls)
    return calls if form is None else replace(form, calls=calls.text)
