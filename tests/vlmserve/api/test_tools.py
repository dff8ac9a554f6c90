"""Tools in requests and calls in answers, whole and streamed, as the official client sees them."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest

from tests.vlmserve.api.fake_engine import (
    HI,
    MODEL,
    Served,
    official_client,
    real_server,
    write_checkpoint_folder,
)

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
OTHER = {"type": "function", "function": {"name": "g"}}
ONE = 'Yes.\n<tool_call>\n{"name": "f", "arguments": {"x": "é\\n"}}\n</tool_call>'
TWO = ONE + '\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'


def ask(ai: openai.OpenAI, **fields: Any) -> Any:
    return ai.chat.completions.create(model=MODEL, messages=fields.pop("messages", HI), **fields)


def streamed(ai: openai.OpenAI, **fields: Any) -> tuple[dict[str, Any], list[Any]]:
    """The message that the deltas come to, and the chunks."""
    chunks = list(ask(ai, stream=True, **fields))
    message: dict[str, Any] = {"content": "", "calls": []}
    for chunk in chunks:
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                if call.index == len(message["calls"]):
                    assert call.type == "function"
                    message["calls"].append({"id": call.id, "name": call.function.name, "arguments": ""})
                else:
                    assert (call.id, call.function.name) == (None, None)
                message["calls"][call.index]["arguments"] += call.function.arguments
            message["finish"] = choice.finish_reason
    return message, chunks


def test_calls(ai, served):
    served.scheduler.say(TWO)
    answer = ask(ai, tools=[OTHER])
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Yes."
    assert [(c.type, c.function.name, c.function.arguments) for c in choice.message.tool_calls] == [
        ("function", "f", '{"x": "é\\n"}'),
        ("function", "g", "{}"),
    ]
    ids = [call.id for call in choice.message.tool_calls]
    assert all(re.fullmatch(r"call_[0-9a-f]{24}", name) for name in ids)
    assert len(set(ids)) == 2
    assert "warnings" not in answer.model_extra


def test_a_call_without_text_has_no_content(ai, served):
    served.scheduler.say(ONE.removeprefix("Yes.\n"))
    assert ask(ai, tools=[TOOL]).choices[0].message.content is None


def test_streamed_calls_are_those_of_the_whole_answer(ai, served):
    served.scheduler.say(TWO)
    message, chunks = streamed(ai, tools=[OTHER])
    assert message["content"] == "Yes."
    assert [(call["name"], call["arguments"]) for call in message["calls"]] == [("f", '{"x": "é\\n"}'), ("g", "{}")]
    assert len({call["id"] for call in message["calls"]}) == 2
    assert message["finish"] == "tool_calls"
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert calls[0].function.arguments == ""  # the first delta names the call
    assert len([call for call in calls if call.index == 0]) > 3  # arguments come bit by bit


def test_answers_without_tools_are_left_alone(ai, served):
    served.scheduler.say(ONE)
    for fields in ({}, {"tools": []}, {"tools": [TOOL], "tool_choice": "none"}):
        [choice] = ask(ai, **fields).choices
        assert choice.message.content == ONE
        assert choice.message.tool_calls is None
        assert choice.finish_reason == "stop"
        assert '"f"' not in served.prompt
        assert streamed(ai, **fields)[0] == {"content": ONE, "calls": [], "finish": "stop"}


@pytest.mark.parametrize("text", ["a <tool_call> b", '<tool_call>\n{"name": 1}\n</tool_call>', "no tool, and <tool"])
def test_what_is_no_call_is_text(ai, served, text):
    served.scheduler.say(text)
    [choice] = ask(ai, tools=[TOOL]).choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")
    assert streamed(ai, tools=[TOOL])[0] == {"content": text, "calls": [], "finish": "stop"}


def test_a_call_that_is_cut(ai, served):
    served.scheduler.say(ONE)
    length = len(served.scheduler.tokenizer.encode(ONE.partition("é")[0]))
    [choice] = ask(ai, tools=[TOOL], max_tokens=length).choices
    assert choice.finish_reason == "length"
    assert [call.function.arguments for call in choice.message.tool_calls] == ['{"x": "']


def test_one_call_where_there_may_be_no_more(ai, served):
    served.scheduler.say(TWO)
    answer = ask(ai, tools=[OTHER], parallel_tool_calls=False)
    assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["f"]
    [warning] = answer.model_extra["warnings"]
    assert "parallel_tool_calls" in warning
    message, chunks = streamed(ai, tools=[OTHER], parallel_tool_calls=False)
    assert [call["name"] for call in message["calls"]] == ["f"]
    assert chunks[-1].model_extra["warnings"] == [warning]


def test_each_choice_has_calls_of_its_own(ai, served):
    served.scheduler.say(ONE)
    answer = ask(ai, tools=[TOOL], n=2)
    assert [choice.message.tool_calls[0].function.name for choice in answer.choices] == ["f", "f"]
    chunks = list(ask(ai, tools=[TOOL], n=2, stream=True))
    named = [c.index for x in chunks for c in x.choices for call in c.delta.tool_calls or () if call.id]
    assert sorted(named) == [0, 1]


def test_logprobs_are_of_all_tokens(ai, served):
    served.scheduler.say(ONE)
    content = ask(ai, tools=[TOOL], logprobs=True).choices[0].logprobs.content
    assert b"".join(bytes(token.bytes) for token in content).decode() == ONE
    chunks = list(ask(ai, tools=[TOOL], logprobs=True, stream=True))
    tokens = [t for x in chunks for c in x.choices if c.logprobs for t in c.logprobs.content]
    assert tokens == content


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_required_call_that_is_cut_leaves_no_text(ai, served, choice):
    scheduler = served.scheduler
    scheduler.say('<tool_call>\n{"name": "f", "arguments": {"x": 5}}\n</tool_call>')
    ids = [scheduler.script(None, place) for place in range(100)]
    for length in range(1, ids.index(scheduler.eos), 3):
        fields: Any = {"tools": [TOOL], "tool_choice": choice, "max_tokens": length}
        whole = ask(ai, **fields).choices[0]
        message, _ = streamed(ai, **fields)
        assert (whole.finish_reason, message["finish"]) == ("length", "length")
        assert (whole.message.content or "", message["content"]) == ("", "")
        given = scheduler.tokenizer.decode(ids[:length], skip_special_tokens=False).partition('"arguments": ')[2]
        begun = [{"name": "f", "arguments": given[: len('{"x": 5}')]}] if given else []
        assert [call.function.model_dump() for call in whole.message.tool_calls or ()] == begun
        assert [{name: one[name] for name in ("name", "arguments")} for one in message["calls"]] == begun


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
def test_a_template_without_tools(serve, tmp_path, choice):
    folder = write_checkpoint_folder(tmp_path)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    served, _client = serve(folder=folder)
    served.scheduler.say("ok")
    with real_server(served.app) as port, official_client(port) as ai:
        answer = ask(ai, tools=[TOOL], tool_choice="auto")
        assert answer.model_extra["warnings"] == ["tools has no effect: the model's chat template knows no tools"]
        message, chunks = streamed(ai, tools=[TOOL])
        assert message["content"] == "ok"
        assert chunks[-1].model_extra["warnings"] == answer.model_extra["warnings"]
        with pytest.raises(openai.BadRequestError, match="knows no tools") as caught:
            ask(ai, tools=[TOOL], tool_choice=choice)
        assert caught.value.param == "tool_choice"


def test_the_format_of_calls_is_set(serve):
    served, _client = serve(tool_call_parser="qwen3_coder")
    served.scheduler.say("<tool_call>\n<function=f>\n<parameter=x>\n5\n</parameter>\n</function>\n</tool_call>")
    typed = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}
    with real_server(served.app) as port, official_client(port) as ai:
        [call] = ask(ai, tools=[{"type": "function", "function": typed}]).choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"x": 5}


def test_through_responses_a_function_is_called_and_its_result_goes_back(ai: openai.OpenAI, served: Served) -> None:
    tool: Any = {"type": "function", **TOOL["function"], "strict": False}
    served.scheduler.say(ONE)
    whole = ai.responses.create(model=MODEL, input="hi", tools=[tool])
    with ai.responses.stream(model=MODEL, input="hi", tools=[tool]) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    for response in (whole, streamed):
        message, call = response.output
        assert (message.type, message.content[0].text) == ("message", "Yes.")
        assert (call.type, call.name, call.arguments) == ("function_call", "f", '{"x": "é\\n"}')
        assert response.status == "completed"
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == '{"x": "é\\n"}'
    result: Any = {"type": "function_call_output", "call_id": whole.output[1].call_id, "output": "42"}
    served.scheduler.say("It is 42.")
    last = ai.responses.create(model=MODEL, input=[result], previous_response_id=whole.id, tools=[tool])
    assert last.output_text == "It is 42."
    assert served.prompt.index("hi") < served.prompt.index("Yes.") < served.prompt.index("42")
