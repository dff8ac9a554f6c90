"""Calls of functions through Responses, as the official client sees them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.vlmserve.api.fake_engine import MODEL, WAIT_S, Served, ids_of, real_server

TOOL: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
SAID = 'Yes.\n<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'


@pytest.fixture
def ai(served: Served) -> Iterator[openai.OpenAI]:
    with (
        real_server(served.app) as port,
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as client,
    ):
        yield client
    served.assert_idle()


def test_a_function_is_called_and_its_result_goes_back(ai: openai.OpenAI, served: Served) -> None:
    served.scheduler.say(SAID)
    whole = ai.responses.create(model=MODEL, input="hi", tools=[TOOL])
    with ai.responses.stream(model=MODEL, input="hi", tools=[TOOL]) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    for response in (whole, streamed):
        message, call = response.output
        assert (message.type, message.content[0].text) == ("message", "Yes.")
        assert (call.type, call.name, call.arguments) == ("function_call", "f", '{"x": "é"}')
        assert response.status == "completed"
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == '{"x": "é"}'
    result: Any = {"type": "function_call_output", "call_id": whole.output[1].call_id, "output": "42"}
    served.scheduler.say("It is 42.")
    last = ai.responses.create(model=MODEL, input=[result], previous_response_id=whole.id, tools=[TOOL])
    assert last.output_text == "It is 42."
    prompt = served.scheduler.tokenizer.decode(ids_of(served.scheduler.requests[-1]), skip_special_tokens=False)
    assert prompt.index("hi") < prompt.index("Yes.") < prompt.index("42")
