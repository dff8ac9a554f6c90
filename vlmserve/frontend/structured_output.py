"""What requests say of an answer's form, in the words of OpenAI, vLLM and SGLang, brought to one `GrammarSpec`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from vlmserve.ipc.messages import GrammarSpec
from vlmserve_common.errors import BadRequestError

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
    """given: fields of a request by their names, None where it leaves one out. BadRequestError for two of them, and for
    one of another shape."""
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
    """value: text; a JSON schema or structural tag may also be an object, and choices are a list of texts."""
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
    """Keys in their order: that is the order of an answer's properties."""
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise _refusal(param, f"{param} is not JSON: {error}") from None


def _refusal(param: str, message: str) -> BadRequestError:
    return BadRequestError(message, param=param, code="invalid_value")
