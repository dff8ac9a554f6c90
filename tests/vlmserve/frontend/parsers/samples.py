"""Answers as models write them, and tools that they call."""

from __future__ import annotations

from vlmserve.frontend.parsers.answer import AnswerReading
from vlmserve.frontend.parsers.calls import CallFormat, ToolUse
from vlmserve.frontend.parsers.hermes import HERMES
from vlmserve.frontend.parsers.pieces import Piece, joined
from vlmserve.frontend.parsers.qwen3_coder import QWEN3_CODER

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "draw",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "count": {"type": "integer"},
                    "size": {"type": ["number", "null"]},
                    "at": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]},
                    "fill": {"type": "boolean"},
                    "mode": {"enum": ["a", 1]},
                    "pen": {"anyOf": [{"$ref": "#/$defs/Pen"}, {"type": "null"}]},
                    "day": {"type": "string", "format": "date"},
                },
                "$defs": {
                    "Pen": {"type": "string", "enum": ["ball", "felt"]},
                    "Point": {"type": "object", "properties": {"x": {"type": "integer"}}},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "clear"}},
]
HERMES_TEXTS = (
    "plain text, with blanks at the end \n",
    'Let me see.\n<tool_call>\n{"name": "draw", "arguments": {"text": "a } <b> \\" \\\\", "at": {"x": [1]}}}\n'
    "</tool_call>",
    '<tool_call>\n{"name": "draw", "arguments": {}}\n</tool_call>\n<tool_call>\n{"name": "clear", "arguments": {}}\n'
    "</tool_call>\n",
    '<tool_call>{"arguments": {"text": "ä🦜"}, "name": "draw"}</tool_call> done',
    '<tool_call>{"name": "draw", "arguments": "{\\"count\\": 1}"}</tool_call>',
    '<tool_call>{"name": "clear"}</tool_call>',
    '<tool_call>{"name": "draw", "arguments": {"count": 1}, "id": "7"}</tool_call>',
    '<tool_call>{"name": "draw", "arguments": {"count": 1}</tool_call>',  # a brace too few
    '<tool_call>{"name": "draw", "arguments": {"count": [1}</tool_call> more',
    '<tool_call>{"name": "draw", "arguments": {"count": 1}} and more',
    'Use <tool_call> for calls.\n<tool_call>\n{"name": "clear", "arguments": {}}\n</tool_call>',
    '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
    '<tool_call>{"name": "draw", "arguments": [1]}</tool_call>',
    '<tool_call>{"name": "draw", "argum',
    '<tool_call>{"name": "draw", "arguments": {"text": "cut',
    '<tool_call>{"name": "draw", "arguments": {"text": "cut"}}\n</tool_',
    "a < b, and <tool",
)
QWEN3_CODER_TEXTS = (
    "plain text, with blanks at the end \n",
    'Let me see.\n\n<tool_call>\n<function=draw>\n<parameter=text>\nfirst\n</para> "q"\n\n</parameter>\n'
    "<parameter=count>\n5\n</parameter>\n<parameter=size>\nNone\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>\n<function=clear>\n</function>\n</tool_call>\n\n<tool_call>\n<function=draw>\n<parameter=at>\n"
    '{"x": 1}\n</parameter>\n</function>\n</tool_call>\n',
    "<function=draw><parameter=fill>True</parameter><parameter=mode>1</parameter></function></tool_call> ok",
    "<tool_call><function=draw><parameter=count>many</parameter></tool_call>",
    "<function=draw><parameter=pen>\n\n felt\n\t</parameter><parameter=day>\n 1999-12-31</parameter></function>",
    "<tool_call><function=draw> junk <parameter=count>1</parameter></function></tool_call>",
    "<tool_call><function=other><parameter=any thing>\n12\n</parameter></function></tool_call>",
    '<tool_call>\n{"name": "draw"}\n</tool_call>',
    "<tool_call>\n<function=dra",
    "<tool_call>\n<function=draw>\n<parameter=te",
    "<tool_call>\n<function=draw>\n<parameter=text>\ncut \n",
    "<tool_call>\n<function=draw>\n<parameter=count>\n4",
    "a < b, and <func",
)
TEXTS: list[tuple[CallFormat, str]] = [
    *((HERMES, text) for text in HERMES_TEXTS),
    *((QWEN3_CODER, text) for text in QWEN3_CODER_TEXTS),
]


def read(call_format: CallFormat | None, *bits: str, reasoning: bool = False, thinking: bool = False) -> list[Piece]:
    """The pieces of an answer that comes in these bits, with neighbours joined."""
    calls = None if call_format is None else ToolUse(tools=TOOLS, call_format=call_format)
    parser = AnswerReading(calls=calls, reasoning=reasoning).parser(thinking=thinking)
    assert parser is not None
    pieces = [piece for bit in bits[:-1] for piece in parser.feed(bit)]
    return joined([*pieces, *parser.feed(bits[-1], final=True)])
