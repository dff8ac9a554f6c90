"""Which form an answer of a chat must have: by what the request says of it, by the calls that it may or must make, and
behind the model's thoughts."""

from __future__ import annotations

from dataclasses import replace

from vlmserve.frontend.grammar_checks import verify_grammar
from vlmserve.frontend.json_schema import SchemaError, check_schema
from vlmserve.frontend.parsers.call_grammar import call_grammar, only_calls
from vlmserve.frontend.parsers.tool_use import ToolUse
from vlmserve.frontend.structured_output import make_spec
from vlmserve.ipc.messages import GrammarSpec
from vlmserve_common.errors import BadRequestError


def chat_grammar(form: GrammarSpec | None, use: ToolUse | None, *, thinking: bool) -> GrammarSpec | None:
    """None where any text will do. BadRequestError for a form and calls that must both be the answer, and for strict
    tools whose schema cannot be followed.

    form: that the request asks for. use: how answers may use tools. thinking: the prompt has begun the model's
    thoughts.
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
        _check_parameters(use.tools[index]["function"].get("parameters", {}), index)
    tag = call_grammar(use) if form is None else only_calls(use)
    if tag is None:
        return None
    calls = make_spec("structural_tag", tag, param="tools", strict=bool(strict))
    verify_grammar(calls)
    return calls if form is None else replace(form, calls=calls.text)


def _check_parameters(schema: object, index: int) -> None:
    try:
        check_schema(schema)
    except SchemaError as error:
        param = f"tools[{index}].function.parameters"
        what = f"{param} is a JSON schema that cannot be followed, and the tool is strict: {error}"
        raise BadRequestError(what, param=param, code="invalid_grammar") from None
