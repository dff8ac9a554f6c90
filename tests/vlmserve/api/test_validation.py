"""Requests that must be refused: each with its own status and an OpenAI error object that names the field."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.vlmserve.api.fake_engine import CHAT, CONTEXT, HI, MODEL, Served, png_url, serving
from vlmserve_common.checkpoint.text_tokenizer import TextTokenizer

# The words of pydantic and of Python, which are nobody's who sends a request.
PYTHON = re.compile(
    r"""Input should|Value error|valid (dict|list|string|integer|number|boolean)|pydantic|NoneType|"""
    r"""\b(None|True|False)\b|\bb(['"]).+?\3|\\x|\b(dict|str|int|float)\b|; got |<class|Traceback"""
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def served(checkpoint_folder: Path) -> Iterator[Served]:
    """One for all of this file: a refused request leaves nothing behind."""
    with serving(checkpoint_folder) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[TestClient]:
    with TestClient(served.app, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture(autouse=True)
def _nothing_left(served: Served) -> Iterator[None]:
    served.scheduler.requests.clear()
    yield
    served.assert_idle()


def body(**fields: Any) -> dict[str, Any]:
    """A good request, with fields changed; one given as ... is left out."""
    whole = {"model": MODEL, "messages": HI, "max_tokens": 4, **fields}
    return {key: value for key, value in whole.items() if value is not ...}


def error_of(reply, status: int) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    assert set(reply.json()) == {"error"}
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    assert not PYTHON.search(error["message"]), error["message"]
    return error


def part(value: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [value]}]}


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [*HI, fields]}


REFUSED = [
    ({"model": 5}, "model"),
    ({"messages": ["hello"]}, "messages[0]"),
    (message(content="hi"), "messages[1]"),
    (message(role="user", content=None), "messages[1].content"),
    (message(role="user", content=[]), "messages[1].content"),
    (message(role="user", content="x", colour="red"), "messages[1].colour"),
    (message(role="assistant", tool_calls=[{"id": "1", "type": "function"}]), "messages[1].tool_calls[0].function"),
    (message(role="tool", content="x"), "messages[1].tool_call_id"),
    (part({"type": "hologram", "hologram": {"url": "x"}}), "messages[0].content[0]"),
    (part({"text": "x"}), "messages[0].content[0]"),
    (part("x"), "messages[0].content[0]"),
    (part({"type": "image_url", "image_url": {}}), "messages[0].content[0].image_url"),
    (
        {"messages": [{"role": "system", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
    ),
    ({"temperature": 2.5}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"min_p": 1.5}, "min_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 10**30}, "top_k"),
    ({"priority": 2**40}, "priority"),
    ({"session_id": ""}, "session_id"),
    ({"cache_salt": "x" * 257}, "cache_salt"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_tokens"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -2}, "top_logprobs"),
    ({"top_logprobs": 5}, "top_logprobs"),
    ({"logit_bias": {"abc": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"512": 5}}, "logit_bias"),
    ({"logit_bias": {"99999999999999": 5}}, "logit_bias"),
    ({"logit_bias": {"5": 1000}}, "logit_bias"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": "x" * 1025}, "stop"),
    ({"stop_token_ids": [512]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include": True}}, "stream_options.include"),
    ({"response_format": {"type": "poem"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema", "json_schema": "x"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}, "response_format.json_schema.schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}},
        "response_format.json_schema.schema",
    ),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_json": {"$ref": "#"}}, "guided_json"),
    ({"json_schema": "{"}, "json_schema"),
    ({"regex": ""}, "regex"),
    ({"structured_outputs": {"xml": "a"}}, "structured_outputs.xml"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs.regex"),
    ({"structured_outputs": {"json_object": True}, "guided_regex": "a"}, "guided_regex"),
    ({"response_format": {"type": "json_object"}, "ebnf": "root ::= a"}, "ebnf"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "nothing"}}}, "tool_choice"),
    ({"tools": [TOOL, TOOL]}, "tools[1].function.name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages"),  # the template's own rule
    ({"messages": [{"role": "user", "content": "What is <|image_pad|> for?"}]}, "messages[0].content"),
    (part({"type": "text", "text": "<|video_pad|>"}), "messages[0].content[0].text"),
    (part({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,eA=="}}), "messages[0].content[0]"),
    (part({"type": "video", "video": ["data:image/png;base64,eA=="] * 2}), "messages[0].content[0]"),
    (part({"type": "video", "video": []}), "messages[0].content[0]"),
    (part({"type": "video", "video": "data:,", "fps": 0}), "messages[0].content[0]"),
    (part({"type": "video", "video": "data:,", "nframes": 769}), "messages[0].content[0]"),
    (part({"type": "video", "video": "data:,", "speed": 2}), "messages[0].content[0].speed"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:60])
def test_refused_with_the_name_of_the_field(client, served, fields, param):
    error = error_of(client.post(CHAT, json=body(**fields)), 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert served.scheduler.requests == []


IN_WORDS = [
    ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
    ({"temperature": True}, "temperature is true; it must be a number"),
    ({"max_tokens": 2.5}, "max_tokens is 2.5; it must be a whole number"),
    ({"max_token": 2}, "max_token is not a known field; did you mean max_tokens?"),
    ({"xyzzy": 2}, "xyzzy is not a known field"),
    ({"stream": "yes"}, "stream is 'yes'; it must be true or false"),
    ({"stop": 5}, "stop is 5; it must be text or a list"),
    ({"stop": ["a", None]}, "stop[1] is null; it must be text"),
    ({"messages": "hello"}, "messages is 'hello'; it must be a list"),
    ({"messages": []}, "messages is an empty list; it must be a list of 1 or more"),
    ({"messages": {"role": "user"}}, "messages is an object; it must be a list"),
    ({"messages": [["hello"]]}, "messages[0] is a list of 1; it must be an object"),
    ({"messages": [{"content": "hi"}]}, "messages[0] has no role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content is missing"),
    (
        {"messages": [{"role": "robot", "content": "hi"}]},
        "messages[0].role is 'robot'; it must be one of 'system', 'developer', 'user', 'assistant', 'tool'",
    ),
    ({"messages": [{"role": "user", "content": 42}]}, "messages[0].content is 42; it must be text or a list of parts"),
    (
        {"messages": [{"role": "assistant"}]},
        "messages[0] needs content or tool_calls, as a message of the assistant",
    ),
    (part({"type": "text", "text": 3}), "messages[0].content[0].text is 3; it must be text"),
    (part({"type": "text", "text": "x" * 999}), None),
    (part({"type": "text", "texts": "x"}), "messages[0].content[0].text is missing"),
    (
        part({"type": "image_url", "image_url": 5}),
        "messages[0].content[0].image_url is 5; it must be a URL, or an object with a url",
    ),
    (
        part({"type": "image_url", "image_url": {"url": "x", "details": "low"}}),
        "messages[0].content[0].image_url.details is not a known field; did you mean detail?",
    ),
    (
        part({"type": "image_url", "image_url": {"url": "x", "detail": "huge"}}),
        "messages[0].content[0].image_url.detail is 'huge'; it must be 'auto', 'low' or 'high'",
    ),
    (
        part({"type": "video", "video": [3]}),
        "messages[0].content[0].video[0] is 3; it must be a URL, or an object with a file_id",
    ),
    ({"tools": [TOOL], "tool_choice": 3}, "tool_choice is 3; it must be none, auto, required or a named function"),
    ({"seed": 2**63}, f"seed is {2**63}; it must be below {2**63}"),
    ({"logit_bias": [5]}, "logit_bias is a list of 1; it must be an object"),
    (
        {"logit_bias": {f"k{number}": 1 for number in range(1025)}},
        "logit_bias is a map of 1025; it must be at most 1024 tokens",
    ),
    (
        {"chat_template_kwargs": dict.fromkeys(map(str, range(1000)))},
        "chat_template_kwargs has 1000 variables; it must have at most 256",
    ),
    ({"modalities": ["video"]}, "modalities[0] is 'video'; it must be 'text' or 'audio'"),
    ({"metadata": {"a": 1}}, "metadata.a is 1; it must be text"),
]


@pytest.mark.parametrize(("fields", "message"), IN_WORDS, ids=lambda value: str(value)[:60])
def test_in_plain_words(client, fields, message):
    error = error_of(client.post(CHAT, json=body(**fields)), 400)
    if message is not None:
        assert error["message"] == message
        assert error["message"].startswith(error["param"])


def test_what_comes_back_of_a_value_is_short(client):
    error = error_of(client.post(CHAT, json=body(temperature="x" * 10**6)), 400)
    assert len(error["message"]) < 200


@pytest.mark.parametrize(
    ("method", "path", "status", "message"),
    [
        ("POST", "/chat/completions", 404, "did you mean /v1/chat/completions?"),
        ("POST", "/v1/v1/chat/completions", 404, "did you mean /v1/chat/completions?"),
        ("POST", "/v1/completion", 404, "did you mean /v1/completions?"),
        ("POST", "/v1/nope", 404, "served are /v1/chat/completions, /v1/completions, "),
        (
            "POST",
            "/v1/images/generations",
            404,
            "takes POST; this version serves no images; served are /v1/chat/completions, ",
        ),
        (
            "POST",
            "/v1/audio/speech",
            404,
            "takes POST; this version serves no audio/speech; served are /v1/chat/completions, ",
        ),
        ("GET", "/x", 404, "there is nothing at /x that takes GET; served are /v1/chat/completions, "),
        ("GET", CHAT, 405, f"there is nothing at {CHAT} that takes GET; it takes POST"),
    ],
)
def test_a_wrong_path(client, method, path, status, message):
    reply = client.request(method, path)
    assert error_of(reply, status)["message"].count(message) == 1
    assert status == 404 or reply.headers["allow"] == "POST"


UNSUPPORTED = [
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"audio": {"voice": "x", "format": "wav"}}, "modalities"),
    ({"prediction": {"type": "content", "content": "x"}}, "prediction"),
    ({"web_search_options": {}}, "web_search_options"),
]


@pytest.mark.parametrize(("fields", "param"), UNSUPPORTED, ids=lambda value: str(value)[:60])
def test_what_is_not_supported_yet_says_so(client, fields, param):
    error = error_of(client.post(CHAT, json=body(**fields)), 400)
    assert "not supported yet" in error["message"]
    assert error["param"] == param


@pytest.mark.parametrize("fields", [{"functions": [{"name": "f"}]}, {"function_call": "auto"}])
def test_former_names_of_tools(client, fields):
    error = error_of(client.post(CHAT, json=body(**fields)), 400)
    assert error["message"].endswith(("send tools, its later name", "send tool_choice, its later name"))
    assert error["param"] in fields


ACCEPTED = [
    {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "safety_identifier": "x"},
    {"prompt_cache_key": "x", "parallel_tool_calls": True, "verbosity": "low", "reasoning_effort": "low"},
    {"response_format": {"type": "text"}, "modalities": ["text"]},
    {"temperature": 0, "top_p": 0, "top_k": 5, "min_p": 0.1, "presence_penalty": -2, "frequency_penalty": 2},
    {"temperature": None, "stop": None, "tools": None, "stream": None, "logit_bias": None, "max_tokens": None},
    {"stop": [], "logit_bias": {}, "tools": [], "stop_token_ids": []},
    {"tools": [TOOL], "tool_choice": "none"},
    {"stream": False, "n": 1, "seed": -1, "ignore_eos": False, "skip_special_tokens": False},
]


@pytest.mark.parametrize("fields", ACCEPTED, ids=str)
def test_accepted(client, fields):
    reply = client.post(CHAT, json=body(**fields))
    assert reply.status_code == 200, reply.text


def test_a_returned_answer_may_be_sent_back(client):
    answer = client.post(CHAT, json=body()).json()["choices"][0]["message"]
    whole = {**answer, "annotations": [], "audio": None, "function_call": None, "tool_calls": None}
    assert client.post(CHAT, json=body(messages=[*HI, whole, *HI])).status_code == 200


def test_a_row_of_a_table_has_nulls_in_the_place_of_other_parts_fields(client):
    text = {"type": "text", "text": "Hello.", "image_url": None, "video_url": None}
    row = {"role": "user", "content": [text], "tool_calls": None, "tool_call_id": None}
    plain = {"role": "user", "content": [{"type": "text", "text": "Hello."}]}
    replies = [client.post(CHAT, json=body(messages=[one])) for one in (row, plain)]
    assert [reply.status_code for reply in replies] == [200, 200]
    assert replies[0].json()["usage"] == replies[1].json()["usage"]
    row["content"] = [text | {"image_url": {"url": "x"}}]
    error_of(client.post(CHAT, json=body(messages=[row])), 400)


@pytest.mark.parametrize(
    "raw", [b'{"model": ', b"", b"[1, 2]", b'"x"', b"\xff\xfe", b'{"temperature": NaN}', b"[" * 9999]
)
def test_a_body_that_is_no_json_object_is_refused(client, raw):
    assert error_of(client.post(CHAT, content=raw), 400)["code"] == "invalid_json"


def test_half_a_surrogate_pair_is_refused(client):
    raw = json.dumps(body(messages=[{"role": "user", "content": "\ud83d"}]))
    assert "\\ud83d" in raw
    error_of(client.post(CHAT, content=raw), 400)


@pytest.mark.parametrize("model", [..., None, ""])
def test_without_a_model_the_only_one_answers(client, model):
    for url, fields in ((CHAT, body()), ("/v1/completions", {"prompt": "hi"}), ("/v1/responses", {"input": "hi"})):
        asked = {**fields, "model": model, "max_output_tokens" if "input" in fields else "max_tokens": 2}
        reply = client.post(url, json={name: value for name, value in asked.items() if value is not ...})
        assert reply.json()["model"] == MODEL


def test_a_wrong_model_is_404(client):
    error = error_of(client.post(CHAT, json=body(model="no-such-model")), 404)
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"


def test_a_prompt_over_the_context_is_refused(client, served):
    for words in (CONTEXT, 1000 * CONTEXT):  # refused by its ids; by its length alone
        error = error_of(client.post(CHAT, json=body(messages=[{"role": "user", "content": "q " * words}])), 400)
        assert error["code"] == "context_length_exceeded"
        assert str(CONTEXT) in error["message"]
        assert "--max-model-len" in error["message"]
    assert served.scheduler.requests == []


@pytest.mark.parametrize(("url", "key"), [(CHAT, "messages"), ("/v1/completions", "prompt"), ("/tokenize", "prompt")])
def test_an_endless_text_is_not_tokenised(client, served, monkeypatch, url, key):
    """It would take minutes and gigabytes. Its length in bytes tells little: some tokens are a hundred blanks."""
    done, encode = [], TextTokenizer.encode
    monkeypatch.setattr(TextTokenizer, "encode", lambda self, text: done.append(len(text)) or encode(self, text))
    text = "q " * 4_000_000
    asked = {"model": MODEL, key: [{"role": "user", "content": text}] if key == "messages" else text}
    error = error_of(client.post(url, json=asked), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", key if url != "/tokenize" else "messages")
    assert sum(done) < 1_000_000


def test_what_is_only_counted_may_be_longer_than_the_context(client, served):
    for text in ("q " * CONTEXT, " " * 100_000):
        told = client.post("/tokenize", json={"prompt": text}).json()
        assert told["tokens"] == served.scheduler.tokenizer.encode(text)


def test_prompt_and_answer_together_must_fit(client, served, monkeypatch):
    used = client.post(CHAT, json=body(max_tokens=1)).json()["usage"]["prompt_tokens"]
    assert client.post(CHAT, json=body(max_tokens=CONTEXT - used)).status_code == 200
    error = error_of(client.post(CHAT, json=body(max_tokens=CONTEXT - used + 1)), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["param"] == "max_tokens"
    assert "--max-model-len" in error["message"]
    monkeypatch.setattr(served.scheduler, "script", lambda request, index: 65)  # never ends by itself
    whole = client.post(CHAT, json=body(max_tokens=...)).json()
    assert whole["usage"]["total_tokens"] == CONTEXT
    assert whole["choices"][0]["finish_reason"] == "length"


BAD_PICTURES = [
    "data:image/png;base64,@@@",
    "data:image/png;base64,",
    "::::",
    "",
    "/etc/hostname",
    "file:///etc/hostname",
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("url", BAD_PICTURES)
def test_a_bad_picture_is_refused_by_its_place(client, url, stream):
    content = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": url}}]
    reply = client.post(CHAT, json=body(messages=[{"role": "user", "content": content}], stream=stream))
    assert error_of(reply, 400)["param"] == "messages[0].content[1]"


def test_too_many_pictures_are_refused(client):
    content = [{"type": "image_url", "image_url": {"url": png_url()}}] * 65
    error = error_of(client.post(CHAT, json=body(messages=[{"role": "user", "content": content}])), 400)
    assert "--max-images-per-request" in error["message"]
