"""Answers as models write them, and tools that they call."""

from __future__ import annotations

from vlmserve.frontend.parsers.answer import AnswerReading
from vlmserve.frontend.parsers.calls import CallFormat, Piece, ToolUse, joined

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


def read(call_format: CallFormat | None, *bits: str, reasoning: bool = False, thinking: bool = False) -> list[Piece]:
    """The pieces of an answer that comes in these bits, with neighbours joined."""
    calls = None if call_format is None else ToolUse(tools=TOOLS, call_format=call_format)
    parser = AnswerReading(calls=calls, reasoning=reasoning).parser(thinking=thinking)
    assert parser is not None
    pieces = [piece for bit in bits[:-1] for piece in parser.feed(bit)]
    return joined([*pieces, *parser.feed(bits[-1], final=True)])
