"""What is found in answers: calls in both formats, thoughts, and text."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest

from tests.vlmserve.frontend.parsers.samples import TOOLS, read
from vlmserve.frontend.parsers.answer import AnswerReading, choose_formats, opened_in_prompt
from vlmserve.frontend.parsers.calls import CallArguments, CallBegin, CallFormat, CallParser, Reasoning, Text, joined
from vlmserve.frontend.parsers.hermes import HERMES
from vlmserve.frontend.parsers.qwen3_coder import QWEN3_CODER


def found(call_format: CallFormat, text: str) -> tuple[str, list[tuple[str, str]]]:
    """The text and the calls, with their arguments as they came."""
    pieces = read(call_format, text)
    names = [piece.name for piece in pieces if isinstance(piece, CallBegin)]
    arguments = [
        "".join(p.text for p in pieces if isinstance(p, CallArguments) and p.index == i) for i in range(len(names))
    ]
    return "".join(p.text for p in pieces if isinstance(p, Text)), list(zip(names, arguments, strict=True))


AS_IT_IS = None  # no call, and all of the text
HERMES_SAMPLES = [
    ("plain text, with blanks at the end \n", AS_IT_IS),
    (
        'Let me see.\n<tool_call>\n{"name": "draw", "arguments": {"text": "a } <b> \\" \\\\", "at": {"x": [1]}}}\n'
        "</tool_call>",
        ("Let me see.", [("draw", '{"text": "a } <b> \\" \\\\", "at": {"x": [1]}}')]),
    ),
    (
        '<tool_call>\n{"name": "draw", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "clear", "arguments": {}}\n</tool_call>\n',
        ("", [("draw", "{}"), ("clear", "{}")]),
    ),
    (
        '<tool_call>{"arguments": {"text": "ä🦜"}, "name": "draw"}</tool_call> done',
        (" done", [("draw", '{"text": "ä🦜"}')]),
    ),
    ('<tool_call>{"name": "draw", "arguments": "{\\"count\\": 1}"}</tool_call>', ("", [("draw", '{"count": 1}')])),
    ('<tool_call>{"name": "clear"}</tool_call>', ("", [("clear", "{}")])),
    ('<tool_call>{"name": "draw", "arguments": {"count": 1}, "id": "7"}</tool_call>', ("", [("draw", '{"count": 1}')])),
    # a brace too few
    ('<tool_call>{"name": "draw", "arguments": {"count": 1}</tool_call>', ("", [("draw", '{"count": 1}')])),
    ('<tool_call>{"name": "draw", "arguments": {"count": [1}</tool_call> more', (" more", [("draw", '{"count": [1}')])),
    ('<tool_call>{"name": "draw", "arguments": {"count": 1}} and more', ("and more", [("draw", '{"count": 1}')])),
    (
        'Use <tool_call> for calls.\n<tool_call>\n{"name": "clear", "arguments": {}}\n</tool_call>',
        ("Use <tool_call> for calls.", [("clear", "{}")]),
    ),
    ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', AS_IT_IS),
    ('<tool_call>{"name": "draw", "arguments": [1]}</tool_call>', AS_IT_IS),
    ('<tool_call>{"name": "draw", "argum', AS_IT_IS),
    ('<tool_call>{"name": "draw", "arguments": {"text": "cut', ("", [("draw", '{"text": "cut')])),
    ('<tool_call>{"name": "draw", "arguments": {"text": "cut"}}\n</tool_', ("", [("draw", '{"text": "cut"}')])),
    ("a < b, and <tool", AS_IT_IS),
]
QWEN3_CODER_SAMPLES = [
    ("plain text, with blanks at the end \n", AS_IT_IS),
    (
        'Let me see.\n\n<tool_call>\n<function=draw>\n<parameter=text>\nfirst\n</para> "q"\n\n</parameter>\n'
        "<parameter=count>\n5\n</parameter>\n<parameter=size>\nNone\n</parameter>\n</function>\n</tool_call>",
        ("Let me see.", [("draw", '{"text": "first\\n</para> \\"q\\"\\n", "count": 5, "size": null}')]),
    ),
    (
        "<tool_call>\n<function=clear>\n</function>\n</tool_call>\n\n<tool_call>\n<function=draw>\n<parameter=at>\n"
        '{"x": 1}\n</parameter>\n</function>\n</tool_call>\n',
        ("", [("clear", "{}"), ("draw", '{"at": {"x": 1}}')]),
    ),
    (
        "<function=draw><parameter=fill>True</parameter><parameter=mode>1</parameter></function></tool_call> ok",
        (" ok", [("draw", '{"fill": true, "mode": 1}')]),
    ),
    ("<tool_call><function=draw><parameter=count>many</parameter></tool_call>", ("", [("draw", '{"count": "many"}')])),
    (
        "<function=draw><parameter=pen>\n\n felt\n\t</parameter><parameter=day>\n 1999-12-31</parameter></function>",
        ("", [("draw", '{"pen": "felt", "day": "1999-12-31"}')]),
    ),
    (
        "<tool_call><function=draw> junk <parameter=count>1</parameter></function></tool_call>",
        (" junk <parameter=count>1</parameter></function></tool_call>", [("draw", "{}")]),
    ),
    (
        "<tool_call><function=other><parameter=any thing>\n12\n</parameter></function></tool_call>",
        ("", [("other", '{"any thing": "12"}')]),
    ),
    ('<tool_call>\n{"name": "draw"}\n</tool_call>', AS_IT_IS),
    ("<tool_call>\n<function=dra", AS_IT_IS),
    ("<tool_call>\n<function=draw>\n<parameter=te", ("", [("draw", "")])),
    ("<tool_call>\n<function=draw>\n<parameter=text>\ncut \n", ("", [("draw", '{"text": "cut \\n')])),
    ("<tool_call>\n<function=draw>\n<parameter=count>\n4", ("", [("draw", '{"count": 4')])),
    ("a < b, and <func", AS_IT_IS),
]
SAMPLES = [
    *((HERMES, text, found) for text, found in HERMES_SAMPLES),
    *((QWEN3_CODER, text, found) for text, found in QWEN3_CODER_SAMPLES),
]
TEXTS = [(call_format, text) for call_format, text, _ in SAMPLES]


@pytest.mark.parametrize(("call_format", "text", "expected"), SAMPLES, ids=lambda value: repr(value)[:40])
def test_text_and_calls(call_format, text, expected):
    assert found(call_format, text) == (expected or (text, []))


@pytest.mark.parametrize(
    ("thoughts", "thinking"), [("", False), ("hm\n\nso\n</think>\n\n", True), ("\n<think>\nhm</think>", False)]
)
@pytest.mark.parametrize(("call_format", "text"), TEXTS, ids=lambda value: repr(value)[:40])
def test_any_way_to_cut_an_answer_gives_the_same(call_format, text, thoughts, thinking):
    whole = thoughts + text
    expected = read(call_format, whole, reasoning=True, thinking=thinking)
    assert read(call_format, *whole, reasoning=True, thinking=thinking) == expected
    dice = random.Random(7)
    for _ in range(60):
        cuts = [0, *sorted(dice.choices(range(len(whole) + 1), k=dice.randint(0, 9))), len(whole)]
        bits = [whole[a:b] for a, b in pairwise(cuts)]
        assert read(call_format, *bits, reasoning=True, thinking=thinking) == expected, bits


@pytest.mark.parametrize(("call_format", "text"), TEXTS, ids=lambda value: repr(value)[:40])
def test_nothing_is_shown_that_may_be_a_tag(call_format, text):
    """After each letter, what is shown of the text is the beginning of what will be."""
    whole = "".join(piece.text for piece in read(call_format, text) if isinstance(piece, Text))
    parser = CallParser(call_format, TOOLS)
    shown = ""
    for letter in text:
        shown += "".join(piece.text for piece in parser.feed(letter) if isinstance(piece, Text))
        assert whole.startswith(shown)


def test_arguments_come_as_they_are_made():
    """Not when the call is whole: a reader is shown each letter of them, when its meaning is certain."""
    for call_format, before, value in (
        (HERMES, '<tool_call>\n{"name": "draw", "arguments": {"text": "', "some words"),
        (QWEN3_CODER, "<tool_call>\n<function=draw>\n<parameter=text>\n", "some words"),
    ):
        parser = CallParser(call_format, TOOLS)
        parser.feed(before)
        assert [joined(parser.feed(letter)) for letter in value] == [[CallArguments(0, letter)] for letter in value]


@pytest.mark.parametrize(
    ("text", "thinking", "expected"),
    [
        ("hm\n\nso\n</think>\n\nIt is.", True, [Reasoning("hm\n\nso"), Text("It is.")]),
        ("<think>\nhm\n</think>\n\nIt is.", False, [Reasoning("hm"), Text("It is.")]),
        ("\n\n<think></think>\n\nIt is.", False, [Text("It is.")]),
        ("It is <think>no</think>.", False, [Text("It is <think>no</think>.")]),
        ("only thoughts\n", True, [Reasoning("only thoughts")]),
        ("thoughts, cut in </thi", True, [Reasoning("thoughts, cut in </thi")]),
        ("a</think>b</think>c", True, [Reasoning("a"), Text("b</think>c")]),
        ("  blanks stay ", False, [Text("  blanks stay ")]),
        ("<thi", False, [Text("<thi")]),
    ],
)
def test_thoughts(text, thinking, expected):
    assert read(None, text, reasoning=True, thinking=thinking) == expected
    assert read(None, *text, "", reasoning=True, thinking=thinking) == expected


def test_a_call_in_thoughts_is_none():
    text = 'I could <tool_call>{"name": "clear", "arguments": {}}</tool_call>\n</think>\n\nNo.'
    assert [type(piece) for piece in read(HERMES, text, reasoning=True, thinking=True)] == [Reasoning, Text]


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>user\nwhat is <think>?<|im_end|>\n<|im_start|>assistant\n", False),
        ("<|im_start|>user\nwhat is <think>?<|im_end|>\n", False),
        ("<|im_start|>assistant\n<think>\nso far", True),
    ],
)
def test_whether_the_prompt_has_begun_thoughts(prompt, opened):
    assert opened_in_prompt(prompt) == opened


def test_the_formats_of_a_template():
    xml, plain = "{% if tools %}<tool_call>\n<function=example>", "{% if tools %}<tool_call>"
    assert choose_formats("auto", "auto", xml).calls is QWEN3_CODER
    assert choose_formats("auto", "auto", plain).calls is HERMES
    assert choose_formats("hermes", "auto", xml).calls is HERMES
    thinks = [
        choose_formats("auto", how, text).reasoning for how in ("auto", "qwen3", "none") for text in ("<think>", "")
    ]
    assert thinks == [True, False, True, True, False, False]
    assert AnswerReading().parser(thinking=True) is None


def test_deep_and_odd_json_is_text_or_arguments_and_no_error():
    deep = '<tool_call>{"arguments": ' + "[" * 100_000 + "</tool_call>"
    assert read(HERMES, deep) == [Text(deep)]
    streamed = '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 50_000
    assert read(HERMES, streamed) == [CallBegin(0, "f"), CallArguments(0, streamed.partition('"arguments": ')[2])]
    surrogate = '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>'
    assert json.loads(read(HERMES, surrogate)[1].text) == {"a": "\ud800"}
