"""Calls that must be made, by the built-in model, which would make none by itself."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.vlmserve.server_process import serving

TURN = {
    "name": "turn",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"to": {"enum": ["left", "right"]}, "times": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["to", "times"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": function} for function in (TURN, {"name": "halt"})]


@pytest.fixture(scope="module", params=["hermes", pytest.param("qwen3_coder", marks=pytest.mark.slow)])
def client(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    runtime = tmp_path_factory.mktemp("calls") / "run"
    with serving(runtime, "--tool-call-parser", request.param) as server, server.client() as client:
        yield client


def ask(client: openai.OpenAI, choice: Any, **options: Any) -> Any:
    return client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Which way?"}],
        tools=TOOLS,
        tool_choice=choice,
        max_tokens=400,
        parallel_tool_calls=False,
        **{"seed": 1, "temperature": 0.8, **options},
    )


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "turn"}}])
def test_a_call_is_made_as_its_schema_says(client, choice):
    [answer] = ask(client, choice).choices
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
    [call] = answer.message.tool_calls
    arguments = json.loads(call.function.arguments)
    if call.function.name == "halt":
        assert (choice, arguments) == ("required", {})
    else:
        assert call.function.name == "turn"
        assert set(arguments) == {"to", "times"}
        assert arguments["to"] in ("left", "right")
        assert arguments["times"] in range(1, 10)


def test_it_streams(client):
    choice = {"type": "function", "function": {"name": "turn"}}
    [whole] = ask(client, choice).choices[0].message.tool_calls
    deltas = [
        call.function for chunk in ask(client, choice, stream=True) for call in chunk.choices[0].delta.tool_calls or ()
    ]
    assert "".join(delta.arguments for delta in deltas) == whole.function.arguments
    assert [delta.name for delta in deltas if delta.name] == ["turn"]


def test_a_schema_that_is_none(client):
    bad = [{"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}]
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "required", extra_body={"tools": bad})
    assert caught.value.param == "tools"


def test_not_with_another_form(client):
    with pytest.raises(openai.BadRequestError, match="exclude each other") as caught:
        ask(client, "required", response_format={"type": "json_object"})
    assert caught.value.param == "tool_choice"
