"""pydantic's findings in plain words, without pydantic's vocabulary.

Nothing here imports pydantic: a finding is the mapping that `ValidationError.errors` gives.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

_SHOWN_CHARS = 80
# pydantic's error types -> the allowed values, with the fields of their contexts
_EXPECTED: Mapping[str, str] = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    "finite_number": "a finite number",
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("string_type", "string_sub_type"), "text"),
    "string_unicode": "text of whole characters",
    **dict.fromkeys(("list_type", "tuple_type", "set_type", "iterable_type"), "a list"),
    **dict.fromkeys(
        ("dict_type", "mapping_type", "model_type", "model_attributes_type", "dataclass_type"), "an object"
    ),
    **dict.fromkeys(("literal_error", "enum"), "{expected}"),
    "none_required": "null, or left out",
    "union_tag_invalid": "one of {expected_tags}",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "multiple_of": "a multiple of {multiple_of}",
    "too_short": "a list of {min_length} or more",
    "too_long": "a list of {max_length} or fewer",
    "string_too_short": "text of at least {min_length} characters",
    "string_too_long": "text of at most {max_length} characters",
    "string_pattern_mismatch": "text of the form {pattern}",
}


def allowed(problem: Mapping[str, Any]) -> str | None:
    """Return the end of "it must be ...". None for a kind of problem that needs other words."""
    template = _EXPECTED.get(problem["type"])
    return None if template is None else template.format_map(problem.get("ctx", {}))


def sentence(problem: Mapping[str, Any], where: str, absent: str = "") -> str:
    """Return a problem as one sentence about the field `where`. absent: the end of one about an unknown field."""
    kind = problem["type"]
    if kind == "missing":
        return f"{where} is missing"
    if kind == "extra_forbidden":
        return f"{where} is not a known field{absent}"
    if kind == "union_tag_not_found":
        return f"{where} has no {problem['ctx']['discriminator'].strip(chr(39))}"
    value = problem["input"]
    if kind == "union_tag_invalid":
        name, value = problem["ctx"]["discriminator"].strip("'"), problem["ctx"]["tag"]
        where = f"{where}.{name}"
    must_be = allowed(problem)
    if must_be is None and problem["msg"].startswith("must be "):
        must_be = problem["msg"].removeprefix("must be ")
    if must_be is None:  # what our own validators say
        return f"{where} {problem['msg'].removeprefix('Value error, ')}"
    return f"{where} is {shown(value)}; it must be {must_be}"


def shown(value: Any) -> str:
    """Return a value as its sender knows it, shortened: it may be megabytes of a client's."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}" if value else "an empty list"
    shortener = reprlib.Repr()
    shortener.maxstring = shortener.maxother = _SHOWN_CHARS
    return shortener.repr(value)


def shortened(text: str) -> str:
    """Return a client's text as an error may repeat it."""
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "..."


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "", *, prefix: str = "") -> str:
    """Return the end of a sentence: "; did you mean x?" if one of the known words is close, else `otherwise`.

    prefix: stands before that word.
    """
    folded = {name.lower().replace("_", "-"): name for name in known}
    close = difflib.get_close_matches(word[:_SHOWN_CHARS].lower().replace("_", "-"), folded, n=1, cutoff=0.7)
    return f"; did you mean {prefix}{folded[close[0]]}?" if close else otherwise
