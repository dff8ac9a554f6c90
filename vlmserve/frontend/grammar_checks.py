"""Checks of what is asked of an answer's form, before it goes to the engine: cheap ones, which say where."""

from __future__ import annotations

import json
from typing import Any

from vlmserve.frontend.json_schema import MAX_DEPTH, SchemaError, check_schema
from vlmserve.ipc.messages import GrammarSpec
from vlmserve_common.errors import BadRequestError

MAX_GRAMMAR_BYTES = 128 * 1024
MAX_CHOICES = 1024


def verify_grammar(spec: GrammarSpec) -> None:
    """BadRequestError for one that is too large, or cannot be: whether it compiles only the engine finds out."""
    size = len(spec.text.encode("utf-8", "surrogatepass"))
    if size > MAX_GRAMMAR_BYTES:
        raise _refusal(spec, f"has {size} bytes; the limit is {MAX_GRAMMAR_BYTES}")
    if not spec.text.strip():
        raise _refusal(spec, "is empty")
    if "\0" in spec.text or not _is_unicode(spec.text):
        raise _refusal(spec, "has a NUL or half a surrogate pair, which no text has")
    if spec.kind == "json_schema":
        _check_json_schema(spec)
    elif spec.kind == "choice":
        _check_choices(spec, json.loads(spec.text))
    elif spec.kind == "structural_tag":
        _parsed(spec)


def _check_json_schema(spec: GrammarSpec) -> None:
    try:
        check_schema(_parsed(spec))
    except SchemaError as error:
        raise _refusal(spec, f"is a JSON schema that cannot be followed: {error}") from None


def _check_choices(spec: GrammarSpec, choices: list[str]) -> None:
    if not 1 <= len(choices) <= MAX_CHOICES:
        raise _refusal(spec, f"has {len(choices)} choices; it must have 1 to {MAX_CHOICES}")
    for index, choice in enumerate(choices):
        if not choice:
            raise _refusal(spec, f"has an empty text as choice {index}")
        if "\0" in choice or not _is_unicode(choice):
            raise _refusal(spec, f"has a NUL or half a surrogate pair in choice {index}, which no text has")


def _parsed(spec: GrammarSpec) -> Any:
    try:
        return json.loads(spec.text)
    except RecursionError:
        raise _refusal(spec, f"is nested too deep; the limit is {MAX_DEPTH}") from None
    except ValueError as error:
        raise _refusal(spec, f"is not JSON: {error}") from None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refusal(spec: GrammarSpec, what: str) -> BadRequestError:
    return BadRequestError(f"{spec.param} {what}", param=spec.param, code="invalid_grammar")
