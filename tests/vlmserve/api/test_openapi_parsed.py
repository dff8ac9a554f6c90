"""Answers with thoughts and calls of tools are what the OpenAPI document says, whole and streamed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vlmserve.api.fake_engine import MODEL, write_checkpoint_folder
from tests.vlmserve.documented import ask
from vlmserve.ipc.messages import FinishReason

SAID = 'I look.\n</think>\n\nYes.\n<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call>'
FUNCTION: dict[str, Any] = {"name": "f", "parameters": {"type": "object"}}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function", "function": FUNCTION}]}
RESPONSE = {"input": "hi", "tools": [{"type": "function", **FUNCTION}], "tool_choice": "auto", "top_logprobs": 1}


@pytest.mark.parametrize(("name", "body"), [("createChatCompletion", CHAT), ("createResponse", RESPONSE)])
def test_thoughts_and_calls(serve, tmp_path: Path, name: str, body: dict[str, Any]) -> None:
    folder = write_checkpoint_folder(tmp_path)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + "<think>\n")
    served, client = serve(folder=folder)
    served.scheduler.say(SAID)
    with client:
        whole = ask(client, name, json={"model": MODEL, **body})
        events = ask(client, name, json={"model": MODEL, **body, "stream": True})
    if name == "createResponse":
        assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call"]
        said = whole["output"][1]["content"][0]
        assert said["text"] in "".join(token["token"] for token in said["logprobs"])
        assert {"response.reasoning_text.done", "response.function_call_arguments.done"} < {e["type"] for e in events}
        return
    [choice] = whole["choices"]
    assert choice["message"].keys() >= {"reasoning_content", "tool_calls"}
    assert choice["finish_reason"] == "tool_calls"
    deltas = [choice["delta"].keys() for event in events for choice in event["choices"]]
    assert {"role", "content", "reasoning_content", "tool_calls"} == set().union(*deltas)


@pytest.mark.parametrize(("name", "body"), [("createChatCompletion", CHAT), ("createResponse", RESPONSE)])
def test_an_engine_that_fails(serve, name: str, body: dict[str, Any]) -> None:
    served, client = serve()
    served.scheduler.fail_with = FinishReason(type="error", message="out of memory", status=500)
    with client:
        assert ask(client, name, json={"model": MODEL, **body})["error"]["type"] == "server_error"
        served.frontend.fail_all("the scheduler died")
        assert ask(client, "getHealth")["error"]["code"] == "engine_unavailable"
