"""Completions, Responses and files with the official client, on the built-in model served by real processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.vlmserve.server_process import SAMPLES, ServerProcess, data_url

PICTURE_URL = data_url(SAMPLES / "shapes.png")
QUESTION = {"type": "input_text", "text": "What is in this picture?"}


@pytest.fixture
def ai(shared_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with shared_server.client() as client:
        yield client


def _complete(ai: openai.OpenAI, prompt: Any, **options: Any) -> Any:
    return ai.completions.create(model="tiny", prompt=prompt, **{"max_tokens": 4, "temperature": 0, **options})


def _respond(ai: openai.OpenAI, given: Any, **options: Any) -> Any:
    return ai.responses.create(model="tiny", input=given, **{"max_output_tokens": 60, "temperature": 0, **options})


def _user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [*parts, QUESTION]}]


# ---------------------------------------------------------------- completions


def test_texts_and_token_ids_are_the_same_prompt(ai: openai.OpenAI) -> None:
    ids = ai.post("/../tokenize", body={"prompt": "Hello there"}, cast_to=dict)["tokens"]
    answers = [_complete(ai, prompt) for prompt in ("Hello there", ["Hello there"], ids, [ids])]
    assert len({answer.choices[0].text for answer in answers}) == 1
    assert {answer.usage.prompt_tokens for answer in answers} == {len(ids)}
    assert answers[0].object == "text_completion"


def test_several_prompts_have_their_answers_in_order(ai: openai.OpenAI) -> None:
    prompts = ["Hello there", "The red", "What is"]
    together = _complete(ai, prompts, n=2, echo=True)
    alone = [_complete(ai, prompt, echo=True) for prompt in prompts]
    assert [choice.index for choice in together.choices] == list(range(6))
    assert [c.text for c in together.choices] == [one.choices[0].text for one in alone for _ in range(2)]
    assert together.usage.prompt_tokens == sum(one.usage.prompt_tokens for one in alone)
    assert together.usage.completion_tokens == 2 * sum(one.usage.completion_tokens for one in alone)


def test_logprobs_in_the_old_shape(ai: openai.OpenAI) -> None:
    text = "Hello wörld"
    choice = _complete(ai, text, echo=True, logprobs=2, extra_body={"ignore_eos": True}).choices[0]
    logprobs, scored = choice.logprobs, _complete(ai, text, echo=True, logprobs=2, max_tokens=0).choices[0]
    count = len(logprobs.tokens)
    assert count == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(logprobs.text_offset)
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    rows = list(zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True))
    for token, logprob, top in rows[1:]:
        assert top[token] == logprob
        assert 2 <= len(top) <= 3
        assert max(top.values()) <= 0
    starts = logprobs.text_offset
    for token, start in zip(logprobs.tokens, starts, strict=True):
        hidden = token.startswith(("bytes:", "<|"))  # parts of a character; special tokens, which have no text
        assert choice.text[start:].startswith(token) or hidden
    assert [t for t in logprobs.tokens if t.startswith("bytes:")] == ["bytes:\\xc3", "bytes:\\xb6"]
    # with max_tokens 0 the prompt alone is scored, the same as when an answer follows
    assert scored.text == text
    prompt_tokens = len(scored.logprobs.tokens)
    assert scored.logprobs.token_logprobs == pytest.approx(
        logprobs.token_logprobs[:prompt_tokens], abs=0.05, nan_ok=True
    )
    assert count == prompt_tokens + 4


def test_a_completion_streams(ai: openai.OpenAI) -> None:
    whole = _complete(ai, ["Hello there", "The red"], logprobs=1, echo=True, max_tokens=8)
    options: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(_complete(ai, ["Hello there", "The red"], logprobs=1, echo=True, max_tokens=8, **options))
    for index, choice in enumerate(whole.choices):
        mine = [one for chunk in chunks for one in chunk.choices if one.index == index]
        assert "".join(one.text for one in mine) == choice.text
        assert [token for one in mine for token in one.logprobs.tokens] == choice.logprobs.tokens
        assert [at for one in mine for at in one.logprobs.text_offset] == choice.logprobs.text_offset
        assert [one.finish_reason for one in mine if one.finish_reason] == [choice.finish_reason]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_stop_seed_and_the_default_length(ai: openai.OpenAI) -> None:
    long = ai.completions.create(model="tiny", prompt="Hello", extra_body={"ignore_eos": True})
    assert long.usage.completion_tokens == 16
    whole = _complete(ai, "The red", max_tokens=8, extra_body={"ignore_eos": True}).choices[0].text
    stopped = _complete(ai, "The red", max_tokens=8, stop=[whole[3:6]], extra_body={"ignore_eos": True}).choices[0]
    assert stopped.text == whole[: whole.index(whole[3:6])]
    assert stopped.finish_reason == "stop"
    seeded = [_complete(ai, "Hello", seed=7, temperature=2, max_tokens=12).choices[0].text for _ in range(2)]
    assert seeded[0] == seeded[1]


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"best_of": 3}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"n": 0}, "n"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["text", 1]}, "prompt[1]"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [99999999]}, "prompt"),
        ({"prompt": "<|image_pad|>"}, "prompt"),
        ({"prompt": "word " * 5000}, "prompt"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
def test_what_a_completion_cannot_do(ai: openai.OpenAI, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        _complete(ai, **{"prompt": "Hello", **options})
    assert caught.value.param == param


def test_an_answer_has_at_least_so_many_tokens(ai: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Hello"}]
    fields: dict[str, Any] = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 40}
    plain = ai.chat.completions.create(**fields)
    count, text = plain.usage.completion_tokens, plain.choices[0].message.content
    assert plain.choices[0].finish_reason == "stop"
    longer = ai.chat.completions.create(**fields, extra_body={"min_tokens": count + 5})
    assert longer.usage.completion_tokens >= count + 5
    assert longer.choices[0].message.content.startswith(text)
    stopped = ai.chat.completions.create(**fields, stop=["Hello"], extra_body={"min_tokens": 2})
    assert stopped.choices[0].message.content.startswith("Hello"), "a stop string was looked for too early"
    completion = _complete(ai, "The red", max_tokens=12, extra_body={"min_tokens": 12})
    assert completion.usage.completion_tokens == 12
    for wrong in (41, -1):
        with pytest.raises(openai.BadRequestError) as caught:
            ai.chat.completions.create(**fields, extra_body={"min_tokens": wrong})
        assert caught.value.param == "min_tokens"


def test_usage_tells_what_the_prompt_is_of(ai: openai.OpenAI) -> None:
    media: Any = [
        {"type": "image_url", "image_url": {"url": PICTURE_URL}},
        {"type": "video_url", "video_url": {"url": data_url(SAMPLES / "rolling.mp4")}},
        {"type": "text", "text": "What is it?"},
    ]
    wanted = {"return_usage_details": True, "return_mm_report": True}
    answer = ai.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": media}], max_tokens=3, extra_body=wanted
    )
    details, reports = answer.usage.prompt_tokens_details.model_dump(), answer.model_extra["mm_report"]
    assert (details["image_tokens"], details["video_tokens"]) == tuple(report["tokens"] for report in reports["media"])
    assert sum(details[f"{kind}_tokens"] for kind in ("text", "image", "video")) == answer.usage.prompt_tokens
    assert answer.usage.model_extra["timings"] == answer.model_extra["timings"]
    given = _user({"type": "input_image", "image_url": PICTURE_URL, "detail": "auto"})
    response = _respond(ai, given, extra_body={"return_usage_details": True})
    assert response.usage.input_tokens_details.model_dump()["image_tokens"] == details["image_tokens"]
    assert response.usage.model_extra["timings"]["total_s"] > 0
    plain = ai.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hi"}], max_tokens=3)
    assert not plain.usage.model_extra
    assert plain.usage.prompt_tokens_details.model_dump(exclude_none=True) == {"cached_tokens": 0}


# ---------------------------------------------------------------- responses


def test_a_response_is_the_chats_answer(ai: openai.OpenAI) -> None:
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    chat = ai.chat.completions.create(model="tiny", messages=messages, temperature=0, max_tokens=60)
    response = _respond(ai, "Hello", instructions="Be brief.", metadata={"a": "b"})
    assert response.output_text == chat.choices[0].message.content
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.total_tokens == chat.usage.total_tokens
    assert (response.status, response.incomplete_details, response.error) == ("completed", None, None)
    assert (response.instructions, response.metadata, response.max_output_tokens) == ("Be brief.", {"a": "b"}, 60)
    [item] = response.output
    assert (item.type, item.role, item.status, len(item.content)) == ("message", "assistant", "completed", 1)


def test_a_response_that_is_cut_is_incomplete(ai: openai.OpenAI) -> None:
    response = _respond(ai, "Hello", max_output_tokens=2)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"
    assert response.usage.output_tokens == 2


def test_the_events_of_a_stream(ai: openai.OpenAI) -> None:
    whole = _respond(ai, "Hello")
    with ai.responses.stream(model="tiny", input="Hello", temperature=0, max_output_tokens=60) as stream:
        events = list(stream)
        final = stream.get_final_response()
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == final.output_text == whole.output_text
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1
    assert final.usage == whole.usage.model_copy(update={"input_tokens_details": final.usage.input_tokens_details})
    assert events[0].response.status == "in_progress"


def test_a_conversation_goes_on_from_a_stored_response(ai: openai.OpenAI) -> None:
    image = {"type": "input_image", "image_url": PICTURE_URL, "detail": "auto"}
    first = _respond(ai, _user(image))
    assert "red circle" in first.output_text
    second = _respond(ai, "And what colour is it?", previous_response_id=first.id)
    by_hand = _respond(
        ai,
        [
            *_user(image),
            *[item.model_dump() for item in first.output],
            {"role": "user", "content": "And what colour is it?"},
        ],
    )
    assert second.output_text == by_hand.output_text
    assert second.usage.input_tokens == by_hand.usage.input_tokens > first.usage.input_tokens
    assert ai.responses.retrieve(second.id) == second
    [item] = ai.responses.input_items.list(second.id)
    assert item.content[0].text == "And what colour is it?"
    ai.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        ai.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError) as caught:
        _respond(ai, "And now?", previous_response_id=second.id)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")


def test_a_response_that_is_not_stored(ai: openai.OpenAI) -> None:
    response = _respond(ai, "Hello", store=False)
    with pytest.raises(openai.NotFoundError):
        ai.responses.retrieve(response.id)


@pytest.mark.parametrize("name", ["shapes.png", "rolling.mp4"])
def test_media_come_in_many_forms(ai: openai.OpenAI, name: str) -> None:
    file, url = ai.files.create(file=SAMPLES / name, purpose="user_data"), data_url(SAMPLES / name)
    parts = [
        {"type": "input_file", "file_id": file.id},
        {"type": "input_file", "file_data": url.partition(",")[2], "filename": name},
        {"type": "input_file", "file_data": url},
    ]
    if name == "shapes.png":
        parts.append({"type": "input_image", "image_url": url, "detail": "auto"})
        parts.append({"type": "input_image", "file_id": file.id, "detail": "auto"})
    answers = [_respond(ai, _user(part), store=False) for part in parts]
    assert len({(answer.output_text, answer.usage.input_tokens) for answer in answers}) == 1
    assert answers[0].usage.input_tokens > 40
    ai.files.delete(file.id)


def test_truncation_leaves_out_the_oldest_turns(ai: openai.OpenAI) -> None:
    old = [{"role": "user", "content": "word " * 3000}, {"role": "assistant", "content": "Yes."}]
    given = [*old, *old, {"role": "user", "content": "Hello"}]
    with pytest.raises(openai.BadRequestError) as caught:
        _respond(ai, given, store=False)
    assert caught.value.code == "context_length_exceeded"
    shorter = _respond(ai, given, truncation="auto", store=False, instructions="Be brief.")
    last = _respond(ai, [*old, given[-1]], store=False, instructions="Be brief.")
    assert shorter.usage.input_tokens == last.usage.input_tokens


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": 9}, "temperature"),
        ({"background": True}, "background"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"input": _user({"type": "input_file", "file_data": "AAAA"})}, "input[0].content[0].file_data"),
        ({"input": [*_user(), *_user({"type": "input_image", "image_url": "data:,x"})]}, "input[1].content[0]"),
        ({"input": [{"type": "function_call_output", "call_id": "c", "output": 3}]}, "input[0].output"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"previous_response_id": 3}, "previous_response_id"),
    ],
)
def test_what_a_response_cannot_do(ai: openai.OpenAI, options: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            ai.responses.create(model="tiny", stream=stream, **{"input": "Hello", **options})
        assert caught.value.param == param


# ---------------------------------------------------------------- tokenization


def test_tokenize_counts_what_a_chat_has(ai: openai.OpenAI) -> None:
    content = [{"type": "image_url", "image_url": {"url": PICTURE_URL}}, {"type": "text", "text": "What is it?"}]
    messages: Any = [{"role": "user", "content": content}]
    found = ai.post("/../tokenize", body={"messages": messages}, cast_to=dict)
    chat = ai.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
    assert found["count"] == len(found["tokens"]) == chat.usage.prompt_tokens
    assert found["max_model_len"] == ai.models.list().data[0].model_extra["max_model_len"]


def test_detokenize_undoes_tokenize(ai: openai.OpenAI) -> None:
    text = "Hello wörld 日本<|im_end|>\n" + "word " * 5000  # longer than the context
    found = ai.post("/../tokenize", body={"prompt": text, "return_token_strs": True}, cast_to=dict)
    assert len(found["token_strs"]) == found["count"] > found["max_model_len"]
    assert found["token_strs"][0] == "Hello"
    assert ai.post("/../detokenize", body={"tokens": found["tokens"]}, cast_to=dict) == {"prompt": text}
    with pytest.raises(openai.BadRequestError, match="token ids below"):
        ai.post("/../detokenize", body={"tokens": [-1]}, cast_to=dict)
