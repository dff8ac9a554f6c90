"""Fields that vLLM's clients send, on the built-in model: ends of answers, ids, allowed tokens, and cut prompts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.vlmserve.server_process import SAMPLES, ServerProcess
from vlmserve import LLM
from vlmserve.config.model_path import DEFAULT_MODEL
from vlmserve_common.checkpoint.text_tokenizer import load_text_tokenizer
from vlmserve_common.errors import BadRequestError

TOKENIZER = load_text_tokenizer(DEFAULT_MODEL)
QUESTION: Any = [{"role": "user", "content": "Hello"}]
END = TOKENIZER.id_of("<|im_end|>")


@pytest.fixture
def ai(shared_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with shared_server.client() as client:
        yield client


def ask(ai: openai.OpenAI, **fields: Any) -> Any:
    own = {name: fields.pop(name) for name in ("stop", "stream", "logprobs", "n", "max_tokens") if name in fields}
    asked: Any = {"model": "tiny", "messages": QUESTION, "temperature": 0, "max_tokens": 24, **own}
    return ai.chat.completions.create(**asked, extra_body=fields)


def ids_of(choice: Any) -> list[int]:
    return choice.model_extra["token_ids"]


def shown_by_logprobs(choice: Any) -> str:
    return b"".join(bytes(entry.bytes) for entry in choice.logprobs.content).decode()


def test_a_stop_string_stays_if_the_request_says_so(ai: openai.OpenAI) -> None:
    whole = ask(ai).choices[0].message.content
    stop = whole[3:7]
    kept: dict[str, Any] = {"stop": [stop], "include_stop_str_in_output": True}
    assert ask(ai, stop=[stop]).choices[0].message.content == whole[: whole.index(stop)]
    choice = ask(ai, logprobs=True, **kept).choices[0]
    assert choice.message.content == whole[: whole.index(stop) + len(stop)]
    assert (choice.finish_reason, choice.model_extra["stop_reason"]) == ("stop", stop)
    assert shown_by_logprobs(choice).startswith(choice.message.content)
    chunks = list(ask(ai, stream=True, **kept))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == choice.message.content
    [text] = ai.completions.create(model="tiny", prompt="Hello", temperature=0, max_tokens=9, echo=True).choices
    stop = text.text[-3:]
    fields: Any = {"model": "tiny", "prompt": "Hello", "temperature": 0, "stop": stop}
    found = ai.completions.create(**fields, extra_body={"include_stop_str_in_output": True}).choices[0]
    assert found.text.endswith(stop)
    with pytest.raises(openai.BadRequestError):
        ask(ai, include_stop_str_in_output="yes")


def test_so_does_a_stop_token(ai: openai.OpenAI) -> None:
    ids = ids_of(ask(ai, return_token_ids=True).choices[0])
    asked: dict[str, Any] = {"stop_token_ids": ids[4:5], "return_token_ids": True, "logprobs": True}
    end = ids.index(ids[4])
    for included, shown in ((False, ids[:end]), (True, ids[: end + 1])):
        choice = ask(ai, include_stop_str_in_output=included, **asked).choices[0]
        assert choice.message.content == shown_by_logprobs(choice) == TOKENIZER.decode(shown)
        assert ids_of(choice) == ids[: end + 1]
    # the model's own end is a special token, which has no text unless the request asks for it
    bias = {"logit_bias": {str(END): 100}, "include_stop_str_in_output": True}
    assert ask(ai, **bias).choices[0].message.content == ""
    assert ask(ai, skip_special_tokens=False, **bias).choices[0].message.content == "<|im_end|>"


def test_only_allowed_tokens_are_sampled(ai: openai.OpenAI) -> None:
    yes, no, other = (TOKENIZER.encode(text)[0] for text in "ynx")
    for fields in ({}, {"logit_bias": {str(other): 100}, "frequency_penalty": 2.0, "repetition_penalty": 2.0}):
        answer = ask(ai, n=4, allowed_token_ids=[yes, no], return_token_ids=True, **fields)
        for choice in answer.choices:
            assert set(ids_of(choice)) <= {yes, no}
            assert choice.finish_reason == "length", "the end is no allowed token"
    sampled = ai.completions.create(
        model="tiny", prompt="a", temperature=2.0, seed=3, max_tokens=40, extra_body={"allowed_token_ids": [yes, no]}
    )
    assert set(sampled.choices[0].text) == {"n", "y"}
    for wrong, words in (([], "an empty list"), ([10**6], "token id 1000000"), ([1] * 1025, "at most 1024")):
        with pytest.raises(openai.BadRequestError, match=words) as caught:
            ask(ai, allowed_token_ids=wrong)
        assert caught.value.param == "allowed_token_ids"


def test_ids_of_prompt_and_answer(ai: openai.OpenAI) -> None:
    prompt = ai.post("/../tokenize", body={"messages": QUESTION}, cast_to=dict)["tokens"]
    whole = ask(ai, return_token_ids=True, n=2, logprobs=True)
    assert whole.model_extra["prompt_token_ids"] == prompt
    assert sum(len(ids_of(choice)) for choice in whole.choices) == whole.usage.completion_tokens
    assert all(TOKENIZER.decode(ids_of(choice)) == choice.message.content for choice in whole.choices)
    chunks = list(ask(ai, return_token_ids=True, stream=True))
    assert chunks[0].model_extra["prompt_token_ids"] == prompt
    assert not any("prompt_token_ids" in chunk.model_extra for chunk in chunks[1:])
    parts = [chunk.choices[0].model_extra.get("token_ids", []) for chunk in chunks]
    assert [token for part in parts for token in part] == ids_of(whole.choices[0])
    plain = ask(ai)
    assert "prompt_token_ids" not in plain.model_extra
    assert "token_ids" not in plain.choices[0].model_extra


def test_ids_of_completions(ai: openai.OpenAI) -> None:
    fields: Any = {"model": "tiny", "prompt": ["Hello", "The red"], "temperature": 0, "max_tokens": 6}
    whole = ai.completions.create(**fields, extra_body={"return_token_ids": True})
    prompts = [TOKENIZER.encode(text) for text in fields["prompt"]]
    assert [choice.model_extra["prompt_token_ids"] for choice in whole.choices] == prompts
    assert [TOKENIZER.decode(ids_of(choice)) for choice in whole.choices] == [c.text for c in whole.choices]
    chunks = list(ai.completions.create(**fields, stream=True, extra_body={"return_token_ids": True}))
    for index, choice in enumerate(whole.choices):
        own = [chunk.choices[0].model_extra for chunk in chunks if chunk.choices[0].index == index]
        assert [one["prompt_token_ids"] for one in own if "prompt_token_ids" in one] == [prompts[index]]
        assert [token for one in own for token in one["token_ids"]] == ids_of(choice)


def test_prompts_are_cut_at_their_beginning(ai: openai.OpenAI) -> None:
    ids = TOKENIZER.encode("The red circle is left of the blue star. " * 3)
    fields: Any = {"model": "tiny", "temperature": 0, "max_tokens": 6}
    short = ai.completions.create(prompt=ids[-10:], **fields)
    cut = ai.completions.create(prompt=ids, **fields, extra_body={"truncate_prompt_tokens": 10})
    assert (cut.usage.prompt_tokens, cut.choices[0].text) == (10, short.choices[0].text)
    longer = ai.completions.create(prompt=ids, **fields, extra_body={"truncate_prompt_tokens": 10_000})
    assert longer.usage.prompt_tokens == len(ids)
    limit = ai.models.list().data[0].model_extra["max_model_len"]
    endless: Any = [{"role": "user", "content": "star " * limit}]
    with pytest.raises(openai.BadRequestError, match="must fit the context"):
        ai.chat.completions.create(messages=endless, **fields)
    fit = ai.chat.completions.create(messages=endless, **fields, extra_body={"truncate_prompt_tokens": -1})
    assert fit.usage.prompt_tokens == limit - 6
    for wrong in (0, -2):
        with pytest.raises(openai.BadRequestError, match="-1, or 1 or more") as caught:
            ask(ai, truncate_prompt_tokens=wrong)
        assert caught.value.param == "truncate_prompt_tokens"
    with pytest.raises(openai.BadRequestError, match="echo"):
        ai.completions.create(prompt=ids, **fields, echo=True, extra_body={"truncate_prompt_tokens": 3})


# ---------------------------------------------------------------- pictures and videos, with a template of their own

TAGS = "<|vision_start|><|{}_pad|><|vision_end|>"
TEMPLATE = (
    "{% for part in messages[0].content %}{% if part.type == 'text' %}{{ part.text }}"
    f"{{% elif part.type == 'image' %}}{TAGS.format('image')}{{% else %}}{TAGS.format('video')}{{% endif %}}"
    "{% endfor %}"
)


@pytest.fixture(scope="module")
def llm(default_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    file = tmp_path_factory.mktemp("template") / "own.jinja"
    file.write_text(TEMPLATE)
    with LLM(default_model, chat_template=file, num_threads=1, max_total_tokens=4096) as llm:
        yield llm


@pytest.mark.parametrize(("kind", "name"), [("image", "shapes.png"), ("video", "rolling.mp4")])
def test_a_cut_leaves_pictures_whole(llm: LLM, kind: str, name: str) -> None:
    asked = [{"type": kind, kind: str(SAMPLES / name)}, {"type": "text", "text": "What is it?"}]
    before = {"type": "text", "text": "The red circle is left of the blue star. " * 5}
    fields: Any = {"temperature": 0.0, "max_tokens": 8, "num_logprobs": 0}
    whole = llm.chat([{"role": "user", "content": asked}], **fields)
    long: Any = [{"role": "user", "content": [before, *asked]}]
    cut = llm.chat(long, truncate_prompt_tokens=whole.prompt_tokens, **fields)
    assert (cut.prompt_tokens, cut.token_ids) == (whole.prompt_tokens, whole.token_ids)
    assert [one.logprob for one in cut.logprobs or ()] == pytest.approx(
        [one.logprob for one in whole.logprobs or ()], abs=1e-4
    )
    with pytest.raises(BadRequestError, match=f"at least {whole.prompt_tokens}: the prompt has") as caught:
        llm.chat(long, truncate_prompt_tokens=whole.prompt_tokens - 1, **fields)
    assert caught.value.param == "truncate_prompt_tokens"


def test_the_fields_as_keywords(llm: LLM) -> None:
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    plain = llm.chat(messages, temperature=0.0, max_tokens=12)
    assert plain.prompt_tokens == len(TOKENIZER.encode("Hello")), "the template of the test"
    stop = plain.text[3:6]
    kept = llm.chat(messages, temperature=0.0, max_tokens=12, stop=stop, include_stop_str_in_output=True)
    assert kept.text == plain.text[: plain.text.index(stop) + 3]
    allowed = TOKENIZER.encode("red")[:1]
    assert set(llm.chat(messages, max_tokens=3, allowed_token_ids=allowed).token_ids) == set(allowed)
