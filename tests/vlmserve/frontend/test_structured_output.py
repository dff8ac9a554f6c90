"""The form that an answer must have: which forms are refused before anything is compiled, and forms beside calls."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from vlmserve.frontend.parsers.calls import ToolUse
from vlmserve.frontend.parsers.hermes import HERMES
from vlmserve.frontend.structured_output import MAX_CHOICES, MAX_GRAMMAR_BYTES, chat_grammar, verify_grammar
from vlmserve.ipc.messages import GrammarSpec
from vlmserve_common.errors import BadRequestError


def refused(kind: str, text: str) -> str:
    with pytest.raises(BadRequestError) as caught:
        verify_grammar(GrammarSpec(kind=kind, text=text, param="the.field"))
    assert caught.value.param == "the.field"
    assert caught.value.message.startswith("the.field ")
    assert len(caught.value.message) < 500
    return caught.value.message


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


GOOD = [
    {},
    True,
    {"type": "object"},
    {"type": ["string", "null"], "maxLength": 3, "title": "a", "description": "b", "default": None},
    {"$defs": {"a": {"type": "object", "properties": {"next": {"$ref": "#/$defs/a"}}}}, "$ref": "#/$defs/a"},
    {"properties": {"a/b": {"type": "integer"}, "c": {"$ref": "#/properties/a~1b"}}, "required": ["c"]},
    {"anyOf": [{"$ref": "#/$defs/x"}, {"type": "null"}], "$defs": {"x": {"enum": ["日本", 1, 1.5, None]}}},
    {"type": "number", "enum": [1, 2.5]},
    {"type": "array", "uniqueItems": False, "items": {"const": {"a": [1]}}},
]


@pytest.mark.parametrize("schema", GOOD)
def test_schemas_that_can_be_followed(schema):
    verify_grammar(GrammarSpec(kind="json_schema", text=json.dumps(schema)))


BAD = [
    ([1], "at # there is a list"),
    ({"properties": {"a": 1}}, "at #/properties/a there is 1"),
    ({"properties": []}, "properties at # is a list; it must be an object of schemas"),
    ({"type": "text"}, "type at # is 'text'; it must be one of array"),
    ({"type": [{"type": "string"}]}, "type at # is an object"),
    ({"items": {"minItems": "3"}}, "minItems at #/items is '3'; it must be a whole number"),
    ({"minLength": True}, "minLength at # is True"),
    ({"enum": []}, "enum at # is empty"),
    ({"anyOf": []}, "anyOf at # is empty"),
    ({"required": "a"}, "required at # is 'a'"),
    ({"required": [1]}, "required at # must be a list of names"),
    ({"properties": {"a": {}}, "required": ["a", "b"]}, "required at # names 'b', which properties lacks"),
    ({"type": "string", "enum": ["a", 1]}, "1 among the values at # is not of type string"),
    ({"type": "integer", "const": True}, "True among the values at # is not of type integer"),
    ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems at #/properties/a is not supported"),
    ({"not": {}}, "not at # is not supported"),
    ({"if": {}, "then": {}}, "if at # is not supported"),
    ({"enum": ["a"], "pattern": "b"}, "enum at # is not supported together with pattern"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {}}, "minimum": 3}, "$ref at # is not supported together with minimum"),
    ({"type": "object", "anyOf": [{}], "required": []}, "anyOf at # is not supported together with required"),
    ({"allOf": [{}, {}]}, "allOf of several schemas at # is not supported"),
    ({"$ref": "#"}, "$ref at # leads to itself"),
    ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}, "$ref at #/$defs/b leads to itself"),
    ({"$ref": "#/$defs/a"}, "$ref at # is '#/$defs/a', and there is no such place"),
    ({"$ref": "https://example.com/a"}, "it must begin with #/"),
    ({"$ref": "#anchor"}, "it must begin with #/"),
    ({"$ref": 5}, "$ref at # is 5; it must be text"),
]


@pytest.mark.parametrize(("schema", "words"), BAD)
def test_schemas_that_cannot(schema, words):
    assert words in refused("json_schema", json.dumps(schema))


@pytest.mark.parametrize("keyword", ["uniqueItems", "not", "if", "contains", "dependentRequired"])
def test_loose_schemas_are_followed_as_far_as_possible(keyword):
    schema = {"properties": {"a": {"enum": [[1]], keyword: {"x": []}}}}
    loose = GrammarSpec(kind="json_schema", text=json.dumps(schema), strict=False, param="the.field")
    assert verify_grammar(loose) == (f"the.field is not strict: {keyword} at #/properties/a has no effect",)
    assert f"{keyword} at #/properties/a is not supported" in refused("json_schema", json.dumps(schema))
    assert verify_grammar(replace(loose, text="{}")) == ()


def test_sizes_have_limits():
    verify_grammar(GrammarSpec(kind="json_schema", text=nested(63)))
    assert "65 schemas deep; the limit is 64" in refused("json_schema", nested(64))
    assert "nested too deep" in refused("json_schema", nested(10_000))
    large = json.dumps({"enum": ["x" * 100] * 10_000})
    assert f"has {len(large)} bytes; the limit is {MAX_GRAMMAR_BYTES}" in refused("json_schema", large)
    assert "the limit" in refused("regex", "é" * (MAX_GRAMMAR_BYTES // 2 + 1))
    assert f"it must have 1 to {MAX_CHOICES}" in refused("choice", json.dumps(["a"] * (MAX_CHOICES + 1)))


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("regex", "", "is empty"),
        ("regex", "a\0", "NUL or half a surrogate pair"),
        ("ebnf", 'root ::= "\ud800"', "NUL or half a surrogate pair"),
        ("choice", "[]", "has 0 choices"),
        ("choice", '["a", ""]', "empty text as choice 1"),
        ("choice", '["\\ud800"]', "in choice 0"),
        ("json_schema", "{", "is not JSON"),
        ("structural_tag", "nothing", "is not JSON"),
    ],
)
def test_texts_that_are_none(kind, text, words):
    assert words in refused(kind, text)


# ---- beside calls

FORM = GrammarSpec(kind="regex", text="a", param="guided_regex")


def use(**more: Any) -> ToolUse:
    function = {"name": "f", **more.pop("function", {})}
    return ToolUse(tools=[{"type": "function", "function": function}], call_format=HERMES, **more)


@pytest.mark.parametrize("thinking", [False, True])
def test_a_form_alone(thinking):
    found = chat_grammar(FORM, None, thinking=thinking)
    assert found is not None
    assert (found.kind, found.text, found.calls, found.thinking) == ("regex", "a", "", thinking)


def test_an_answer_is_of_the_form_or_calls():
    found = chat_grammar(FORM, use(), thinking=True)
    assert found is not None
    assert (found.kind, found.text, found.param, found.thinking) == ("regex", "a", "guided_regex", True)
    assert json.loads(found.calls)["format"]["at_least_one"]


@pytest.mark.parametrize("wanted", [use(choice="required"), use(name="f"), use(function={"strict": True})])
def test_calls_alone(wanted):
    found = chat_grammar(None, wanted, thinking=False)
    assert found is not None
    assert (found.kind, found.param, found.thinking) == ("structural_tag", "tools", False)
    assert found.strict == (not wanted.required)


def test_strict_tools_have_schemas_that_can_be_followed():
    function: dict[str, Any] = {"parameters": {"properties": {"x": {"not": {}}}}}
    assert chat_grammar(None, use(function=function), thinking=False) is None
    with pytest.raises(BadRequestError, match="not at #/properties/x is not supported") as caught:
        chat_grammar(None, use(function={**function, "strict": True}), thinking=False)
    assert caught.value.param == "tools[0].function.parameters"


def test_tools_are_not_endless():
    function = {"parameters": {"description": "x" * 200_000}}
    with pytest.raises(BadRequestError, match=r"tools has \d+ bytes; the limit is") as caught:
        chat_grammar(None, use(function=function, choice="required"), thinking=False)
    assert caught.value.param == "tools"
