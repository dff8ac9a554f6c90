"""LangChain's ChatOpenAI and LiteLLM, over real sockets."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from tests.vlmserve.api import fake_engine
from tests.vlmserve.api.fake_engine import MODEL, WAIT_S, Served, ids_of, png_url, real_server, serving

PICTURE: list[Any] = [
    {"type": "image_url", "image_url": {"url": png_url()}},
    {"type": "text", "text": "What is it?"},
]
SAID = 'Yes.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"rain in {city}"


@pytest.fixture(scope="module")
def running(checkpoint_folder: Path) -> Iterator[tuple[Served, str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fake_engine, "CONTEXT", 1024)  # descriptions of tools are long
        with serving(checkpoint_folder, api_key="secret") as served, real_server(served.app) as port:
            yield served, f"http://127.0.0.1:{port}/v1"


@pytest.fixture
def served(running: tuple[Served, str]) -> Served:
    return running[0]


@pytest.fixture
def chat(running: tuple[Served, str]) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=running[1], api_key="secret", max_retries=0, timeout=WAIT_S)


@pytest.fixture
def litellm() -> ModuleType:
    """It takes seconds to import, which processes that only collect tests need not."""
    return importlib.import_module("litellm")


@pytest.fixture
def litellm_options(running: tuple[Served, str]) -> dict[str, Any]:
    return {"model": f"openai/{MODEL}", "api_base": running[1], "api_key": "secret", "max_retries": 0}


# ---------------------------------------------------------------- LangChain


def test_langchain_shows_a_picture(chat: ChatOpenAI, served: Served) -> None:
    served.scheduler.say("a red square")
    answer = chat.invoke([HumanMessage(PICTURE)])
    assert answer.content == "a red square"
    assert answer.usage_metadata["input_tokens"] == len(served.scheduler.requests[-1].input_ids)
    assert answer.usage_metadata["output_tokens"] == len(served.scheduler.tokenizer.encode("a red square")) + 1
    assert answer.response_metadata["finish_reason"] == "stop"
    # LangChain's own form of a picture, too
    data = png_url().partition(",")[2]
    own: list[Any] = [{"type": "image", "base64": data, "mime_type": "image/png"}, PICTURE[1]]
    before = served.scheduler.requests[-1].input_ids.tolist()
    assert chat.invoke([HumanMessage(own)]).content == "a red square"
    assert ids_of(served.scheduler.requests[-1]) == before
    chunks = list(chat.stream([HumanMessage(PICTURE)], stream_usage=True))
    assert "".join(chunk.content for chunk in chunks) == "a red square"
    assert len([chunk for chunk in chunks if chunk.content]) > 1
    whole = sum(chunks[1:], chunks[0])
    assert whole.usage_metadata["total_tokens"] > whole.usage_metadata["input_tokens"] > 0


@pytest.mark.parametrize("streams", [False, True])
def test_langchain_calls_a_tool(chat: ChatOpenAI, served: Served, streams: bool) -> None:
    served.scheduler.say(SAID)
    able = chat.bind_tools([weather], tool_choice="auto")
    question = HumanMessage("How is the weather in Köln?")
    if streams:
        chunks = list(able.stream([question]))
        answer: Any = sum(chunks[1:], chunks[0])
    else:
        answer = able.invoke([question])
    [call] = answer.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Köln"})
    assert "The weather in a city." in served.prompt
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    served.scheduler.say("It rains.")
    said = AIMessage(answer.content, tool_calls=answer.tool_calls)
    assert able.invoke([question, said, result]).content == "It rains."
    assert "rain in Köln" in served.prompt


def test_langchain_through_responses(running: tuple[Served, str], served: Served) -> None:
    served.scheduler.say("a red square")
    chat = ChatOpenAI(model=MODEL, base_url=running[1], api_key="secret", max_retries=0, use_responses_api=True)
    answer = chat.invoke([HumanMessage(PICTURE)])
    assert answer.text == "a red square"
    assert "".join(chunk.text for chunk in chat.stream([HumanMessage(PICTURE)])) == "a red square"


# ---------------------------------------------------------------- LiteLLM


def test_litellm_shows_a_picture(litellm: ModuleType, litellm_options: dict[str, Any], served: Served) -> None:
    served.scheduler.say("a red square")
    messages = [{"role": "user", "content": PICTURE}]
    answer = litellm.completion(messages=messages, **litellm_options)
    assert answer.choices[0].message.content == "a red square"
    assert answer.usage.prompt_tokens == len(served.scheduler.requests[-1].input_ids)
    assert answer.usage.prompt_tokens_details.cached_tokens == answer.usage.prompt_tokens // 2
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(litellm.completion(messages=messages, **options, **litellm_options))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == "a red square"
    assert chunks[-1].usage.total_tokens == answer.usage.total_tokens


def test_litellm_calls_a_tool(litellm: ModuleType, litellm_options: dict[str, Any], served: Served) -> None:
    served.scheduler.say(SAID)
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    answer = litellm.completion(messages=[{"role": "user", "content": "hi"}], tools=tools, **litellm_options)
    [call] = answer.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Köln"})
    assert answer.choices[0].finish_reason == "tool_calls"


def test_litellm_completes(litellm: ModuleType, litellm_options: dict[str, Any], served: Served) -> None:
    served.scheduler.say("a red square")
    options = {**litellm_options, "model": f"text-completion-openai/{MODEL}"}
    answer = litellm.text_completion(prompt="It is", **options)
    assert answer.choices[0].text == "a red square"
    assert answer.usage.prompt_tokens == len(served.scheduler.tokenizer.encode("It is"))
    chunks = list(litellm.text_completion(prompt="It is", stream=True, **options))
    assert "".join(chunk.choices[0].text or "" for chunk in chunks if chunk.choices) == "a red square"


def test_litellm_understands_errors(litellm: ModuleType, litellm_options: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "hi"}]
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(messages=messages, temperature=3, **litellm_options)
    with pytest.raises(litellm.AuthenticationError):
        litellm.completion(messages=messages, **{**litellm_options, "api_key": "wrong"})
