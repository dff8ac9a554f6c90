"""Grammars of calls, as xgrammar understands them, and that what fits them is read as the calls that it is."""

from __future__ import annotations

import json
from typing import Any

import pytest
import xgrammar

from vlmserve.config.model_path import DEFAULT_MODEL
from vlmserve.frontend.parsers.calls import ToolUse, call_grammar
from vlmserve.frontend.parsers.hermes import HERMES
from vlmserve.frontend.parsers.qwen3_coder import QWEN3_CODER
from vlmserve.ipc.messages import GrammarSpec
from vlmserve.scheduler.grammar.serving import compile_grammar
from vlmserve_common.checkpoint.text_tokenizer import load_text_tokenizer

F = {
    "name": "f",
    "strict": True,
    "parameters": {
        "type": "object",
        "additionalProperties": False,
        "required": ["x"],
        "properties": {"x": {"type": "string", "enum": ["p", "q"]}, "n": {"type": "integer"}},
    },
}
G = {"name": "g", "strict": False, "parameters": {"type": "object", "required": ["y"]}}
TOOLS = [{"type": "function", "function": function} for function in (F, G, {"name": "h"})]


@pytest.fixture(scope="module")
def compiler() -> Any:
    tokenizer = load_text_tokenizer(DEFAULT_MODEL)
    vocab = [tokenizer.token_bytes(index) for index in range(tokenizer.num_ids)]
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(vocab, xgrammar.VocabType.RAW))


def fits(compiler: Any, text: str, **use: Any) -> bool:
    tag = call_grammar(ToolUse(**{"tools": TOOLS, "call_format": HERMES, **use}))
    spec = GrammarSpec(kind="structural_tag", text=json.dumps(tag))
    matcher = xgrammar.GrammarMatcher(compile_grammar(compiler, spec))
    return matcher.accept_string(text) and matcher.is_completed()


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def xml(name: str, **arguments: str) -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


GOOD = call("f", '{"x": "p"}')


def test_one_call_or_more(compiler):
    fitting = [
        (GOOD, True),
        (call("f", '{"x": "q", "n": 3}') + "\n" + GOOD, True),
        (call("g", '{"z": [1]}'), True),
        (call("h", "{}"), True),
        (call("f", '{"x": "z"}'), False),
        (call("f", "{}"), False),
        (call("f", '{"x":"p"}'), False),
        (call("f", '{"x": "q",\n"n": 3}'), False),
        (call("f", '{"x": "p"\n}'), False),
        (call("g", '{"z":  [1]}'), False),
        (call("h", "[]"), False),
        (call("other", "{}"), False),
        (GOOD + " and text", False),
        ("text", False),
        ("", False),
    ]
    assert [(text, fits(compiler, text, choice="required")) for text, _ in fitting] == fitting
    assert fits(compiler, GOOD, choice="required", parallel=False)
    assert not fits(compiler, GOOD + "\n" + GOOD, choice="required", parallel=False)


def test_the_one_that_is_named(compiler):
    assert fits(compiler, GOOD, name="f")
    assert not fits(compiler, GOOD + "\n" + GOOD, name="f")
    assert not fits(compiler, call("h", "{}"), name="f")


def test_text_with_calls_of_strict_tools(compiler):
    assert fits(compiler, "text")
    assert fits(compiler, "text\n" + GOOD + "\n" + call("g", "{}"))
    assert not fits(compiler, "text\n" + call("f", '{"x": "z"}'))
    assert not fits(compiler, GOOD + GOOD, parallel=False)


def test_qwen3_coder(compiler):
    fitting = [
        (xml("f", x="p"), True),
        (xml("f", x="q", n="3") + "\n" + xml("h"), True),
        (xml("f", x="z"), False),
        (xml("f"), False),
        ("text", False),
    ]
    assert [(text, fits(compiler, text, choice="required", call_format=QWEN3_CODER)) for text, _ in fitting] == fitting
