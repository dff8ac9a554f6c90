"""Answers, whole and streamed, of requests that succeed."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.vlmserve.api.fake_engine import BODY, CHAT, HI, MODEL, ids_of, png_url
from vlmserve.config.model_path import DEFAULT_MODEL
from vlmserve.frontend.openai.answers import AnswerHead, AnswerWriter
from vlmserve.frontend.sampling import choice_seed
from vlmserve.frontend.tokenizer_manager import ChoiceOutput
from vlmserve.ipc.messages import AbortReq, FinishReason, TokenOutput
from vlmserve_common.checkpoint.text_tokenizer import load_text_tokenizer


def chat(client, **fields: Any) -> dict[str, Any]:
    reply = client.post(CHAT, json={"model": MODEL, "messages": HI, "max_tokens": 16, "temperature": 0, **fields})
    assert reply.status_code == 200, reply.text
    return reply.json()


def stream(client, **fields: Any) -> list[dict[str, Any]]:
    body = {"model": MODEL, "messages": HI, "max_tokens": 16, "temperature": 0, "stream": True, **fields}
    reply = client.post(CHAT, json=body)
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    events = reply.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


def text_of(answer: dict[str, Any], index: int = 0) -> str:
    return answer["choices"][index]["message"]["content"]


def joined(chunks: list[dict[str, Any]], index: int = 0) -> str:
    return "".join(c["delta"].get("content", "") for x in chunks for c in x["choices"] if c["index"] == index)


def finishes(chunks: list[dict[str, Any]], index: int = 0) -> list[str]:
    return [c["finish_reason"] for x in chunks for c in x["choices"] if c["index"] == index and c["finish_reason"]]


def test_an_answer_that_ends_by_itself(client, served):
    served.scheduler.say("naïve 日本語 🦜")
    answer = chat(client, max_tokens=100)
    assert text_of(answer) == "naïve 日本語 🦜"
    assert answer["choices"][0]["finish_reason"] == "stop"
    chunks = stream(client, max_tokens=100)
    assert joined(chunks) == "naïve 日本語 🦜"
    assert all("\ufffd" not in json.dumps(c, ensure_ascii=False) for c in chunks)


def test_the_prompt_is_the_rendered_template(client, served):
    tool = {"type": "function", "function": {"description": "d", "name": "f"}}  # keys in the client's order
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
    messages = [
        {"role": "developer", "content": "short"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
    ]
    chat(client, messages=messages, tools=[tool], chat_template_kwargs={"enable_thinking": False})
    (request,) = served.scheduler.requests
    assert served.prompt == (
        f"<|im_start|>system\n{json.dumps(tool)}\n<|im_end|>\n<|im_start|>system\nshort<|im_end|>\n"
        '<|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\nf({"x": "é"})<|im_end|>\n'
        "<|im_start|>tool\ndone<|im_end|>\n<|im_start|>assistant\n<think></think>"
    )
    assert request.mm_inputs is None


def test_the_last_message_can_be_continued(client, served):
    messages = [*HI, {"role": "assistant", "content": "It is a"}]
    chat(client, messages=messages, continue_final_message=True)
    assert served.prompt.endswith("<|im_start|>assistant\nIt is a")


def test_pictures_are_expanded_in_prompt_order(client, served):
    red, blue = png_url((255, 0, 0), (56, 28)), png_url((0, 0, 255), (28, 28))
    content = [
        {"type": "image_url", "image_url": {"url": red, "detail": "low"}},
        {"type": "text", "text": "and"},
        {"type": "image", "image": blue},
        {"type": "image_url", "image_url": red},
    ]
    answer = chat(client, messages=[{"role": "user", "content": content}])
    (request,) = served.scheduler.requests
    pad = served.scheduler.tokenizer.id_of("<|image_pad|>")
    ids = ids_of(request)
    items = request.mm_inputs.items
    assert [item.num_tokens for item in items] == [2, 1, 2]
    assert ids.count(pad) == 5
    assert items[0].digest == items[2].digest != items[1].digest
    assert all(ids[start:end] == [pad] * (end - start) for item in items for start, end in item.offsets)
    assert request.mm_inputs.mrope_positions.shape == (3, len(ids))
    assert answer["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_the_limit_of_tokens(client, field):
    answer = chat(client, **{"max_tokens": None, field: 1})
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "length"
    assert (answer["model"], answer["choices"][0]["logprobs"]) == (MODEL, None)


def test_sampling_defaults_are_the_checkpoints(client, served):
    chat(client, temperature=None)
    chat(client, temperature=0.5, top_p=1.0, top_k=-1)
    first, second = (request.sampling_params for request in served.scheduler.requests)
    assert (first.temperature, first.top_p, first.top_k) == (0.7, 0.8, 20)
    assert (second.temperature, second.top_p, second.top_k) == (0.5, 1.0, -1)


def test_all_sampling_fields_arrive(client, served):
    same = {"temperature": 0.5, "top_p": 0.4, "top_k": 3, "min_p": 0.1, "seed": 5, "presence_penalty": 1}
    same |= {"frequency_penalty": -1, "ignore_eos": True, "skip_special_tokens": False}
    chat(client, **same, stop=["a", "b"], stop_token_ids=[7], logit_bias={"5": -3.5}, logprobs=True)
    (request,) = served.scheduler.requests
    params = request.sampling_params
    assert {name: getattr(params, name) for name in same} == same
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("a", "b"), (7,), {5: -3.5})
    assert params.max_new_tokens == 16
    assert request.num_logprobs == 0


def test_seeds(client, served):
    def sample(**fields):
        return text_of(chat(client, temperature=1, max_tokens=24, **fields))

    assert sample(seed=7) == sample(seed=7) != sample(seed=8)
    sample()
    sample()
    first, second = (request.sampling_params.seed for request in served.scheduler.requests[-2:])
    assert first != second, "requests without a seed must not repeat each other"
    assert chat(client, temperature=0) | {"id": 0, "created": 0} == chat(client) | {"id": 0, "created": 0}


def test_several_choices(client, served):
    answer = chat(client, n=3, temperature=1, seed=1)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({text_of(answer, i) for i in range(3)}) == 3
    assert answer["usage"]["completion_tokens"] == 48
    assert answer["usage"]["prompt_tokens"] == len(served.scheduler.requests[0].input_ids)
    assert [r.sampling_params.seed for r in served.scheduler.requests] == [choice_seed(1, i) for i in range(3)]
    assert text_of(answer, 0) == text_of(chat(client, temperature=1, seed=1))
    chunks = stream(client, n=3, temperature=1, seed=1)
    for index in range(3):
        assert joined(chunks, index) == text_of(answer, index)
        assert finishes(chunks, index) == ["length"]
        first = next(c for x in chunks for c in x["choices"] if c["index"] == index)
        assert first["delta"]["role"] == "assistant"


def output_of(index: int, done: int, *, text: str = "", cached: int = 0, ends: bool = False) -> ChoiceOutput:
    """What the engine sends of a choice that has so many tokens."""
    output = TokenOutput(
        rid=str(index),
        text=text,
        token_ids=(1,),
        finish_reason=FinishReason(type="length") if ends else None,
        prompt_tokens=17,
        completion_tokens=done,
        cached_tokens=cached,
    )
    return ChoiceOutput(index=index, output=output)


def writer_of(model: str = "m", **options: Any) -> AnswerWriter:
    head = AnswerHead(id="x", created=0, model=model)
    return AnswerWriter(head, load_text_tokenizer(DEFAULT_MODEL), n=2, logprobs=False, **options)


def test_usage_counts_the_prompt_once():
    """Later choices find the prompt of the first in the cache, which is no news to who pays for it."""

    async def outputs():
        for index, done, cached in ((0, 1, 3), (1, 1, 16), (0, 4, 3), (1, 5, 16)):
            yield output_of(index, done, cached=cached)

    assert asyncio.run(writer_of().whole(outputs()))["usage"] == {
        "prompt_tokens": 17,
        "completion_tokens": 9,
        "total_tokens": 26,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


def test_logprobs(client, served):
    served.scheduler.say("日 ok")
    answer = chat(client, logprobs=True, top_logprobs=3)
    content = answer["choices"][0]["logprobs"]["content"]
    assert answer["usage"]["completion_tokens"] - len(content) == 1  # the end token
    for item in content:
        assert item["logprob"] == -0.5
        assert bytes(item["bytes"]).decode("utf-8", "replace") == item["token"]
        values = [top["logprob"] for top in item["top_logprobs"]]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert all(set(top) == {"token", "bytes", "logprob"} for top in item["top_logprobs"])
    assert b"".join(bytes(item["bytes"]) for item in content).decode() == text_of(answer) == "日 ok"
    chunks = stream(client, logprobs=True, top_logprobs=3)
    streamed = [t for x in chunks for c in x["choices"] for t in (c["logprobs"] or {}).get("content", [])]
    assert streamed == content
    assert chat(client, logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_impossible_tokens_have_a_finite_logprob(client, served, monkeypatch):
    from vlmserve.frontend.openai import answers

    monkeypatch.setattr(answers, "_LEAST_LOGPROB", -0.25)  # the fake says -0.5
    assert chat(client, logprobs=True)["choices"][0]["logprobs"]["content"][0]["logprob"] == -0.25


# ---- stop strings


@pytest.mark.parametrize(
    ("stop", "text", "matched"),
    [
        ("white", "a red square on ", "white"),
        (["white"], "a red square on ", "white"),
        ("uare o", "a red sq", "uare o"),
        (["white", "square", "☃☃"], "a red ", "square"),
        ("a", "", "a"),
        ("☃☃☃", "a red square on white", None),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_stop_strings(client, served, stop, text, matched, streamed):
    served.scheduler.say("a red square on white")
    if streamed:
        chunks = stream(client, stop=stop)
        assert joined(chunks) == text
        assert finishes(chunks) == ["stop"]
        assert chunks[-1]["choices"][0]["stop_reason"] == matched
    else:
        answer = chat(client, stop=stop)
        assert text_of(answer) == text
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["choices"][0]["stop_reason"] == matched


def test_the_scheduler_hears_of_a_stop_string(client, served):
    served.scheduler.say("a red square on white")
    answer = chat(client, stop="square")
    assert served.scheduler.aborts == [AbortReq(rid=served.scheduler.requests[0].rid, finished=True)]
    tokens = served.scheduler.tokenizer.encode("a red square")
    assert answer["usage"]["completion_tokens"] == len(tokens)


# ---- streaming


def test_the_shape_of_a_stream(client):
    chunks = stream(client)
    assert len({c["id"] for c in chunks}) == 1
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert joined(chunks) == text_of(chat(client))
    assert finishes(chunks) == ["length"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert sum(bool(c["choices"][0]["delta"].get("content")) for c in chunks) == 16
    assert all(c["choices"] and "usage" not in c for c in chunks)


TEXTS = ("", " a", '"\\\n\t', "日本\u2028🦜", '""', "</s>")


def written(together: bool, model: str, **options: Any) -> list[dict[str, Any]]:
    """The chunks of two choices' outputs, which come at once or one by one."""
    writer = writer_of(model, **options)
    items = [
        output_of(index, place, text=text, ends=place == len(TEXTS))
        for place, text in enumerate(TEXTS, 1)
        for index in range(2)
    ]
    parts = [writer.events(items)] if together else [writer.events([item]) for item in items]
    events = b"".join([*parts, writer.usage_event()]).split(b"\n\n")
    assert events.pop() == b""
    return [json.loads(event.removeprefix(b"data: ")) for event in events]


@pytest.mark.parametrize("model", ["", 'odd ""}],"\\'])
@pytest.mark.parametrize("include_usage", [False, True])
def test_outputs_that_wait_for_a_slow_client_are_the_same_chunks(include_usage, model):
    chunks = written(True, model, include_usage=include_usage)
    assert chunks == written(False, model, include_usage=include_usage)
    for index in range(2):
        assert joined(chunks, index) == "".join(TEXTS)
        assert finishes(chunks, index) == ["length"]
    usage = {"usage": None} if include_usage else {}
    assert chunks[2] == {
        "id": "x",
        "object": "chat.completion.chunk",
        "created": 0,
        "model": model,
        "choices": [{"index": 0, "delta": {"content": " a"}, "logprobs": None, "finish_reason": None}],
        **usage,
    }
    assert len(chunks) == 2 * (1 + sum(map(bool, TEXTS)) + 1) + include_usage


def test_a_stream_with_usage(client):
    chunks = stream(client, n=2, stream_options={"include_usage": True})
    assert all(c["usage"] is None for c in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == chat(client, n=2)["usage"]


# ---- failures of the engine


@pytest.mark.parametrize(("status", "kind"), [(400, "invalid_request_error"), (500, "server_error")])
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_the_engine_refuses_or_fails_on(client, served, status, kind, stream):
    served.scheduler.fail_with = FinishReason(type="error", message="no luck", status=status)
    reply = client.post(CHAT, json={**BODY, "stream": stream})
    error = reply.json()["error"]
    assert (reply.status_code, error["message"], error["type"]) == (status, "no luck", kind)


def test_a_failure_in_the_middle_of_a_stream_is_an_event(client, served):
    def script(request, index):
        if index == 2:
            served.frontend.fail_all("the engine is gone")
        return 65

    served.scheduler.script = script
    chunks = stream(client)
    assert chunks[-1]["error"]["code"] == "engine_unavailable"
    assert finishes(chunks[:-1]) == []


def test_an_unexpected_failure_leaks_nothing(client, served, monkeypatch):
    def broken(*args, **kwargs):
        raise RuntimeError("secret /path")

    monkeypatch.setattr(served.frontend.manager.builder, "tokenize", broken)
    for streamed in (False, True):
        reply = client.post(CHAT, json={**BODY, "stream": streamed})
        assert reply.status_code == 500
        assert reply.json()["error"]["code"] == "internal_error"
        assert "secret" not in reply.text
