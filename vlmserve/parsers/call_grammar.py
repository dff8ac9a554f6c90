"""What answers with calls are made of, for decoding that is held to it: xgrammar's structural tags.

https://xgrammar.mlc.ai/docs/structural_tag/structural_tag has their form.
"""

from __future__ import annotations

from typing import Any

from vlmserve.parsers.calls import CallFormat, Tool
from vlmserve.parsers.reasoning import CLOSE as THOUGHT
from vlmserve.parsers.tool_use import ToolUse

_MAX_WHITESPACE = 32  # between two tokens of JSON: a small model might go on with it


def call_grammar(use: ToolUse, *, thinking: bool) -> dict[str, Any] | None:
    """The structural tag that answers must match; None where any text will do.

    Required calls are all that the answer has. Otherwise there may be text, and calls in it are held to the schemas of
    strict tools. thinking: the prompt has begun the model's thoughts, which come before all that.
    """
    tag = _calls(use)
    if tag is None:
        return None
    return {"type": "structural_tag", "format": after_thoughts(tag) if thinking else tag}


def after_thoughts(tag: dict[str, Any]) -> dict[str, Any]:
    """What an answer is made of whose prompt has begun the model's thoughts: their rest, then what `tag` allows."""
    thoughts = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": THOUGHT}
    return {"type": "sequence", "elements": [thoughts, {"type": "const_string", "value": "\n\n"}, tag]}


def _calls(use: ToolUse) -> dict[str, Any] | None:
    if use.name is not None:
        [tool] = [tool for tool in use.tools if tool["function"]["name"] == use.name]
        return _call(tool, use.call_format, held=True)
    if use.choice == "required":
        return {
            "type": "tags_with_separator",
            "tags": [_call(tool, use.call_format, held=True) for tool in use.tools],
            "separator": "\n",
            "at_least_one": True,
            "stop_after_first": not use.parallel,
        }
    strict = [bool(tool["function"].get("strict")) for tool in use.tools]
    if any(strict) or not use.parallel:
        return {
            "type": "triggered_tags",
            "triggers": [use.call_format.tags[0]],
            "tags": [_call(tool, use.call_format, held=held) for tool, held in zip(use.tools, strict, strict=True)],
            "stop_after_first": not use.parallel,
        }
    return None


def _call(tool: Tool, call_format: CallFormat, *, held: bool) -> dict[str, Any]:
    """One call. held: to the schema of its arguments, unless the tool says that it need not be."""
    function = tool["function"]
    begin, end = call_format.wrap(function["name"])
    schema = function.get("parameters") if held and function.get("strict") is not False else None
    content = {
        "type": "json_schema",
        "json_schema": {"type": "object"} if schema is None else schema,
        "style": call_format.style,
        "max_whitespace_cnt": _MAX_WHITESPACE,
    }
    return {"type": "tag", "begin": begin, "content": content, "end": end}
