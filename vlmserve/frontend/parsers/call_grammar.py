"""What answers with calls are made of, for decoding that is held to it: xgrammar's structural tags.

https://xgrammar.mlc.ai/docs/structural_tag/structural_tag has their form.
"""

from __future__ import annotations

from typing import Any

from vlmserve.frontend.parsers.calls import Tool
from vlmserve.frontend.parsers.tool_use import ToolUse

_MAX_WHITESPACE = 1  # between two tokens of JSON: a small model might go on with it


def call_grammar(use: ToolUse) -> dict[str, Any] | None:
    """The structural tag that answers must match; None where any text will do.

    Required calls are all that the answer has. Otherwise there may be text, and calls in it are held to the schemas of
    strict tools.
    """
    if use.required:
        return only_calls(use)
    if use.parallel and not any(map(_is_strict, use.tools)):
        return None
    return _tag(
        {
            "type": "triggered_tags",
            "triggers": [use.call_format.tags[0]],
            "tags": [_call(tool, use) for tool in use.tools],
            "stop_after_first": not use.parallel,
        }
    )


def only_calls(use: ToolUse) -> dict[str, Any]:
    """The structural tag of an answer that is nothing but a call, or several of them."""
    if use.name is not None:
        [tool] = [tool for tool in use.tools if tool["function"]["name"] == use.name]
        return _tag(_call(tool, use))
    return _tag(
        {
            "type": "tags_with_separator",
            "tags": [_call(tool, use) for tool in use.tools],
            "separator": "\n",
            "at_least_one": True,
            "stop_after_first": not use.parallel,
        }
    )


def _is_strict(tool: Tool) -> bool:
    return bool(tool["function"].get("strict"))


def _tag(form: dict[str, Any]) -> dict[str, Any]:
    return {"type": "structural_tag", "format": form}


def _call(tool: Tool, use: ToolUse) -> dict[str, Any]:
    """One call. Its arguments are held to their schema if the tool is strict; if it says nothing of that, where calls
    are required."""
    function = tool["function"]
    begin, end = use.call_format.wrap(function["name"])
    held = _is_strict(tool) or (use.required and function.get("strict") is None)
    schema = function.get("parameters") if held else None
    content = {
        "type": "json_schema",
        "json_schema": {"type": "object"} if schema is None else schema,
        "style": use.call_format.style,
        "max_whitespace_cnt": _MAX_WHITESPACE,
    }
    return {"type": "tag", "begin": begin, "content": content, "end": end}
