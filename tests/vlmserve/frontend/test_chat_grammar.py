"""Which form an answer must have where a request says something of it, of calls, or of both."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vlmserve.frontend.parsers.calls import ToolUse
from vlmserve.frontend.parsers.hermes import HERMES
from vlmserve.frontend.structured_output import chat_grammar
from vlmserve.ipc.messages import GrammarSpec
from vlmserve_common.errors import BadRequestError

FORM = GrammarSpec(kind="regex", text="a", param="guided_regex")


def use(**more: Any) -> ToolUse:
    function = {"name": "f", **more.pop("function", {})}
    return ToolUse(tools=[{"type": "function", "function": function}], call_format=HERMES, **more)


def test_any_text():
    assert chat_grammar(None, None, thinking=True) is None
    assert chat_grammar(None, use(), thinking=True) is None


@pytest.mark.parametrize("thinking", [False, True])
def test_a_form_alone(thinking):
    found = chat_grammar(FORM, None, thinking=thinking)
    assert found is not None
    assert (found.kind, found.text, found.calls, found.thinking) == ("regex", "a", "", thinking)


@pytest.mark.parametrize("wanted", [use(choice="required"), use(name="f"), use(function={"strict": True})])
def test_calls_alone(wanted):
    found = chat_grammar(None, wanted, thinking=False)
    assert found is not None
    assert (found.kind, found.param, found.thinking) == ("structural_tag", "tools", False)
    assert found.strict == (not wanted.required)


def test_an_answer_is_of_the_form_or_calls():
    found = chat_grammar(FORM, use(), thinking=True)
    assert found is not None
    assert (found.kind, found.text, found.param, found.thinking) == ("regex", "a", "guided_regex", True)
    assert json.loads(found.calls)["format"]["at_least_one"]


def test_a_call_that_must_be_made_leaves_no_room_for_a_form():
    with pytest.raises(BadRequestError, match="guided_regex and a tool_choice that requires a call exclude") as caught:
        chat_grammar(FORM, use(choice="required"), thinking=False)
    assert caught.value.param == "tool_choice"


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
