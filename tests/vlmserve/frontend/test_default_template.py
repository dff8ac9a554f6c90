"""The built-in model's chat template: what it was trained with, and tools, which it was not."""

from __future__ import annotations

import pytest

from assets.recipe.chatml import CHAT_TEMPLATE
from vlmserve.config.model_path import DEFAULT_MODEL
from vlmserve.frontend.chat_messages import to_template_messages
from vlmserve.frontend.chat_template import load_chat_template
from vlmserve.frontend.parsers.answer import choose_formats
from vlmserve.frontend.parsers.hermes import HERMES

HI = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "description": "d & é"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
RESULTS = [{"role": "tool", "tool_call_id": str(i), "content": text} for i, text in enumerate(("one", "two"))]
SYSTEM = (
    "# Tools\n\nYou may call these functions:\n<tools>\n"
    '{"type": "function", "function": {"name": "f", "description": "d & é"}}\n</tools>\n\n'
    'A call is a JSON object within tags:\n<tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call><|im_end|>\n'
)


def render(*messages, **options) -> str:
    return load_chat_template(DEFAULT_MODEL).render(to_template_messages(messages)[0], **options)


@pytest.mark.parametrize("add", [False, True])
def test_conversations_as_it_was_trained(add):
    content = [
        {"type": "image", "image": "x.png"},
        {"type": "text", "text": " a\n "},
        {"type": "video", "video": ["x.png"]},
        {"type": "text", "text": "b"},
    ]
    messages = [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": content},
        {"role": "assistant", "content": " a square "},
        {"role": "user", "content": ""},
    ]
    assert render(*messages, add_generation_prompt=add) == (
        "<|im_start|>system\nbe short<|im_end|>\n<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|> a\n "
        "<|vision_start|><|video_pad|><|vision_end|>b<|im_end|>\n<|im_start|>assistant\n a square <|im_end|>\n"
        "<|im_start|>user\n<|im_end|>\n" + "<|im_start|>assistant\n" * add
    )


def test_tools():
    assert render(HI, tools=[TOOL], add_generation_prompt=False) == (
        f"<|im_start|>system\n{SYSTEM}<|im_start|>user\nhi<|im_end|>\n"
    )
    brief = {"role": "developer", "content": "be short"}
    assert render(brief, HI, tools=[TOOL]) == (
        f"<|im_start|>system\nbe short\n\n{SYSTEM}<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(("text", "before"), [(None, ""), ("well", "well\n")])
def test_calls_and_their_results(text, before):
    calls = {"role": "assistant", "content": text, "tool_calls": [CALL, CALL]}
    call = '<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'
    assert render(HI, calls, *RESULTS) == (
        f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{before}{call}\n{call}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_recipe_has_the_same():
    assert (DEFAULT_MODEL / "chat_template.jinja").read_text(encoding="utf-8") == CHAT_TEMPLATE
    formats = choose_formats("auto", "auto", CHAT_TEMPLATE)
    assert (formats.calls, formats.reasoning) == (HERMES, False)
