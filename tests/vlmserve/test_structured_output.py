"""Structured output over HTTP with the clients that people use, and whatever else the engine is at."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import instructor
import openai
import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

from tests.default_model import copy_default_model
from tests.vlmserve.server_process import ServerProcess, serving
from vlmserve import LLM
from vlmserve.config.model_path import DEFAULT_MODEL
from vlmserve_common.checkpoint.text_tokenizer import load_text_tokenizer

OWN = (
    *("n", "stream", "stream_options", "logprobs", "stop", "max_tokens"),
    *("response_format", "logit_bias", "tools", "tool_choice"),
)
THINKS = "{% if add_generation_prompt and enable_thinking %}{{ '<think>\\n' }}{% endif %}"
TOKENIZER = load_text_tokenizer(DEFAULT_MODEL)
QUESTION = [{"role": "user", "content": "What is a red circle?"}]


class Shape(BaseModel):
    kind: Literal["circle", "square", "star"]
    color: str = Field(max_length=12)
    corners: int = Field(ge=0, le=9)
    tags: list[Literal["a", "b"]] = Field(max_length=2)


SCHEMA = Shape.model_json_schema()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("serve")
    (folder / "model").mkdir()
    copy_default_model(folder / "model")
    template = folder / "model" / "chat_template.jinja"
    template.write_text(template.read_text() + THINKS)
    flags = ("--max-total-tokens", "16384", "--grammar-timeout-s", "3", "--speculative-num-draft-tokens", "4")
    with serving(folder / "run", *flags, model=folder / "model") as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    """fields: the client's own, and any others of the request."""
    own = {name: fields.pop(name) for name in OWN if name in fields}
    asked = {"model": "tiny", "messages": QUESTION, "temperature": 1.0, "seed": 1, "max_tokens": 200, **own}
    return client.chat.completions.create(**asked, extra_body=fields)


def tag(**form: str) -> dict[str, Any]:
    return {"response_format": {"type": "structural_tag", "format": form}}


def text_of(answer: Any) -> str:
    assert answer.choices[0].finish_reason == "stop"
    return answer.choices[0].message.content


def places(server: ServerProcess) -> list[int]:
    """Right guesses by position, as /metrics has them."""
    text = server.get("metrics")[1]
    return [int(float(n)) for n in re.findall(r"vlmserve:spec_decode_num_accepted_tokens_per_pos_total{.*} (.*)", text)]


def test_usage_tells_of_guesses(client, server):
    """Of one answer and of several, whole and in chunks, and of all together what /metrics counts."""
    form = {"guided_regex": "(this|that) is the rest of the text", "return_spec_tokens_details": True}
    text = {"model": "tiny", "prompt": ["A star:", "A circle:"], "max_tokens": 60, "extra_body": form}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    found = Counter(dict(enumerate(places(server))))
    usages = [ask(client, **form).usage, ask(client, n=3, **form).usage, client.completions.create(**text).usage]
    usages += [
        list(ask(client, **form, **stream))[-1].usage,
        list(client.completions.create(**text, **stream))[-1].usage,
    ]
    for usage in usages:
        spec, details = usage.model_extra["spec_tokens_details"], usage.completion_tokens_details
        right, right_at = spec["spec_num_correct_drafts"], spec["spec_num_correct_drafts_per_pos"]
        assert 0 < right == sum(right_at) == details.accepted_prediction_tokens < usage.completion_tokens
        assert right + details.rejected_prediction_tokens == spec["spec_num_proposed_drafts"]
        assert spec["spec_accept_length"] == 1 + right / spec["spec_verify_ct"]
        assert sorted(right_at, reverse=True) == right_at
        found.update(dict(enumerate(right_at)))
    assert [found[at] for at in range(4)] == places(server)
    plain = [ask(client, guided_regex=form["guided_regex"]).usage, ask(client, max_tokens=3).usage]
    assert [bool(usage.completion_tokens_details.accepted_prediction_tokens) for usage in plain] == [True, False]
    assert not any(usage.model_extra for usage in plain)
    assert ask(client, return_spec_tokens_details=True, max_tokens=3).usage.model_extra["spec_tokens_details"] == {
        "spec_verify_ct": 0,
        "spec_num_proposed_drafts": 0,
        "spec_num_correct_drafts": 0,
        "spec_num_correct_drafts_per_pos": [],
        "spec_accept_length": 0.0,
    }


def test_the_official_client_parses(client):
    answer = client.chat.completions.parse(
        model="tiny", messages=QUESTION, response_format=Shape, max_tokens=200, n=3, temperature=1.0, seed=5
    )
    assert all(isinstance(choice.message.parsed, Shape) for choice in answer.choices)
    assert len({choice.message.content for choice in answer.choices}) > 1, "each has its own place in the grammar"


def test_streams_are_whole(client):
    form = {"type": "json_schema", "json_schema": {"name": "shape", "schema": SCHEMA}}
    chunks = list(ask(client, response_format=form, stream=True))
    assert Shape.model_validate_json("".join(c.choices[0].delta.content or "" for c in chunks if c.choices))


@pytest.mark.parametrize(
    ("fields", "fits"),
    [
        ({"guided_json": SCHEMA}, Shape.model_validate_json),
        ({"json_schema": json.dumps(SCHEMA)}, Shape.model_validate_json),
        ({"structured_outputs": {"json": SCHEMA}}, Shape.model_validate_json),
        ({"guided_choice": ["yes", "日本"]}, ["yes", "日本"].index),
        ({"structured_outputs": {"choice": ["only this"]}}, ["only this"].index),
        ({"guided_regex": "[0-9]{4}"}, int),
        ({"regex": "[0-9]{4}"}, int),
        ({"structured_outputs": {"regex": "[0-9]{4}"}}, int),
        ({"guided_grammar": 'root ::= "x" | "y"'}, ["x", "y"].index),
        ({"ebnf": 'root ::= "x" | "y"'}, ["x", "y"].index),
        ({"structured_outputs": {"grammar": 'root ::= "x" | "y"'}}, ["x", "y"].index),
        (tag(type="const_string", value="hello"), ["hello"].index),
        (tag(type="regex", pattern="[0-9]{4}"), int),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else "",
)
def test_every_spelling(client, fields, fits):
    fits(text_of(ask(client, **fields)))


def test_json_object_is_an_object(client):
    form = {"type": "json_object"}
    assert ask(client, response_format=form, max_tokens=30).choices[0].message.content.startswith("{")
    assert text_of(ask(client, response_format=form, logit_bias=EMPTY_OBJECT)) == "{}"
    unlikely = dict.fromkeys(EMPTY_OBJECT, -100)
    forced = ask(client, response_format=form, logit_bias=unlikely, max_tokens=30)
    assert forced.choices[0].message.content.startswith("{"), "a bias cannot allow what the grammar does not"


def test_stop_strings_bias_and_ignore_eos(client):
    answer = ask(client, guided_regex="abc|abd", stop=["b"])
    assert (text_of(answer), answer.choices[0].finish_reason) == ("a", "stop")
    answer = ask(client, guided_regex="abc", ignore_eos=True, logprobs=True)
    assert text_of(answer) == "abc"
    first = answer.choices[0].logprobs.content[0]
    assert first.logprob < -0.01, "of the model's own distribution"


def test_the_form_goes_before_allowed_tokens(client):
    allowed = [TOKENIZER.encode(digit)[0] for digit in "37"]
    found = text_of(ask(client, allowed_token_ids=allowed, guided_regex="[0-9]{3}"))
    assert len(found) == 3, "the form's end, which is not among them, ends it"
    assert set(found) <= {"3", "7"}
    assert text_of(ask(client, allowed_token_ids=allowed, guided_choice=["yes"])) == "yes"


def test_keywords_of_a_loose_schema_are_left_out_with_a_warning(client):
    schema = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
    form: dict[str, Any] = {"name": "a", "schema": schema, "strict": False}
    answer = ask(client, response_format={"type": "json_schema", "json_schema": form})
    assert len(json.loads(text_of(answer))) == 2
    [warning] = answer.model_extra["warnings"]
    assert "uniqueItems at # has no effect" in warning
    loose: dict[str, Any] = {"type": "json_schema", "json_schema": form}
    asked: dict[str, Any] = {"prompt": ["a", "b"], "max_tokens": 9, "extra_body": {"response_format": loose}}
    assert client.completions.create(model="tiny", **asked).model_extra["warnings"] == [warning]
    chunks = list(client.completions.create(model="tiny", stream=True, **asked))
    assert [chunk.model_extra.get("warnings") for chunk in chunks if chunk.model_extra] == [[warning]]
    assert chunks[-1].model_extra["warnings"] == [warning]
    with pytest.raises(openai.BadRequestError, match="uniqueItems at # is not supported"):
        ask(client, response_format={"type": "json_schema", "json_schema": {**form, "strict": True}})


def test_completions(client):
    fields: dict[str, Any] = {"model": "tiny", "max_tokens": 200, "temperature": 1.0, "seed": 1}
    for form, fits in (
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "shape", "schema": SCHEMA}}}, None),
        ({"guided_choice": ["yes", "no"]}, ["yes", "no"].index),
    ):
        answer = client.completions.create(prompt=["A red circle:", "A star:"], extra_body=form, **fields)
        assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
        assert all((fits or Shape.model_validate_json)(choice.text) is not None for choice in answer.choices)
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(prompt="a", extra_body={"guided_regex": "(a"}, **fields)
    assert caught.value.param == "guided_regex"


def test_responses(client):
    fields: dict[str, Any] = {"model": "tiny", "input": "What is it?", "max_output_tokens": 200, "temperature": 0.0}
    assert isinstance(client.responses.parse(text_format=Shape, **fields).output_parsed, Shape)
    for schema, words in (({"not": {}}, "not at #"), ({"type": "integer", "minimum": 9, "maximum": 1}, "minimum")):
        form: Any = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
        with pytest.raises(openai.BadRequestError, match=words) as caught:
            client.responses.create(text=form, **fields)
        assert caught.value.param == "text.format.schema"


NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": "turn", "strict": True, "parameters": NOTHING}}]


def test_thoughts_come_before_the_form(client):
    [end] = [token for token in TOKENIZER.encode("</think>") if TOKENIZER.token_bytes(token) == b"</think>"]
    thinking: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": True}}
    choices = ["yes", "no"]
    answer = ask(client, logit_bias={str(end): 100}, guided_choice=choices, **thinking)
    assert text_of(answer) in ("yes", "no")
    cut = ask(client, max_tokens=20, logit_bias={str(end): -100}, guided_choice=choices, **thinking).choices[0]
    assert (cut.finish_reason, cut.message.content) == ("length", "")
    assert cut.message.model_extra["reasoning_content"]
    calling = ask(client, logit_bias={str(end): 100}, tools=TOOLS, tool_choice="required", **thinking)
    [call, *_] = calling.choices[0].message.tool_calls
    assert call.function.name == "turn"


def test_an_answer_is_of_the_form_or_calls(client):
    begin = {str(TOKENIZER.encode("<tool_call>")[0]): 100}
    assert text_of(ask(client, tools=TOOLS, guided_choice=["yes", "no"])) in ("yes", "no")
    calling = ask(client, tools=TOOLS, guided_choice=["yes", "no"], logit_bias=begin, parallel_tool_calls=False)
    assert calling.choices[0].finish_reason == "tool_calls"
    assert calling.choices[0].message.content is None


# ---- calls that must be made, by a model that would make none by itself

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
CALLED: dict[str, Any] = {"type": "function", "function": {"name": "turn"}}


def called(client: openai.OpenAI, choice: Any, **options: Any) -> Any:
    tools = [{"type": "function", "function": function} for function in (TURN, {"name": "halt"})]
    return ask(client, tools=tools, tool_choice=choice, max_tokens=400, parallel_tool_calls=False, **options)


def check_call(answer: Any) -> None:
    [choice] = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    [call] = choice.message.tool_calls
    arguments = json.loads(call.function.arguments)
    if call.function.name == "halt":
        assert arguments == {}
    else:
        assert (call.function.name, set(arguments)) == ("turn", {"to", "times"})
        assert arguments["to"] in ("left", "right")
        assert arguments["times"] in range(1, 10)


def test_a_call_is_made_as_its_schema_says(client):
    check_call(called(client, "required"))
    whole = called(client, CALLED)
    check_call(whole)
    [call] = whole.choices[0].message.tool_calls
    chunks = called(client, CALLED, stream=True)
    deltas = [call.function for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(delta.arguments for delta in deltas) == call.function.arguments
    assert [delta.name for delta in deltas if delta.name] == ["turn"]


PAINT: dict[str, Any] = {
    "name": "paint",
    "parameters": {
        "type": "object",
        "properties": {"shape": {"type": "string", "enum": ["circle", "star"]}, "filled": {"type": "boolean"}},
        "required": ["shape"],
    },
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "paint"}}])
def test_arguments_do_not_run_on_in_blanks(client, choice):
    """They have the blanks of the template's examples, and so few tokens are enough."""
    tools = [{"type": "function", "function": PAINT}]
    for question in ("What is the weather in Oslo?", "Paint a red star", "Hello"):
        fields: Any = {"messages": [{"role": "user", "content": question}], "tools": tools, "tool_choice": choice}
        for temperature in (0.0, 1.0):
            answer = client.chat.completions.create(
                model="tiny", max_tokens=60, temperature=temperature, seed=3, parallel_tool_calls=False, **fields
            )
            [done] = answer.choices
            assert done.finish_reason == "tool_calls"
            [call] = done.message.tool_calls
            assert call.function.arguments == json.dumps(json.loads(call.function.arguments))


@pytest.mark.slow
def test_a_call_in_the_form_of_qwen3_coder(tmp_path):
    with serving(tmp_path / "run", "--tool-call-parser", "qwen3_coder") as server, server.client() as client:
        check_call(called(client, "required"))
        check_call(called(client, CALLED))


def test_calls_that_cannot_be_made(client):
    bad = [{"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}]
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, tools=bad, tool_choice="required")
    assert caught.value.param == "tools"
    with pytest.raises(openai.BadRequestError, match="exclude each other") as caught:
        called(client, "required", response_format={"type": "json_object"})
    assert caught.value.param == "tool_choice"


class Anything(BaseModel):
    """`{}` is one, too: the only object that a small model ends when nothing says what is in it."""

    color: str = "red"


EMPTY_OBJECT = {str(TOKENIZER.encode(text)[0]): 100 for text in "{}"}


def test_langchain(server):
    with server.client() as client:
        url = str(client.base_url)
    model = ChatOpenAI(base_url=url, api_key="none", model="tiny", max_tokens=200, temperature=0.0, max_retries=0)
    assert isinstance(model.with_structured_output(Shape, method="json_schema").invoke("What is it?"), Shape)
    parsed = model.with_structured_output(SCHEMA, method="json_schema", strict=True).invoke("What is it?")
    assert Shape.model_validate(parsed)
    assert isinstance(model.with_structured_output(Shape, method="function_calling").invoke("What is it?"), Shape)
    for choice in ("paint", "any"):
        brief = model.model_copy(update={"max_tokens": 60})
        [call, *_] = brief.bind_tools([PAINT], tool_choice=choice).invoke("Paint a red star").tool_calls
        assert (call["name"], call["args"]["shape"]) == ("paint", "star")
    model = model.model_copy(update={"model_kwargs": {"logit_bias": EMPTY_OBJECT}})
    assert model.with_structured_output(Anything, method="json_mode").invoke("What is it?") == Anything()


def test_instructor(client):
    fields: dict[str, Any] = {"model": "tiny", "messages": QUESTION, "temperature": 0.0, "max_retries": 0}
    schema = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA)
    assert isinstance(schema.create(response_model=Shape, max_tokens=200, **fields), Shape)
    calls = instructor.from_openai(client, mode=instructor.Mode.TOOLS)
    assert isinstance(calls.create(response_model=Shape, max_tokens=200, **fields), Shape)
    plain = instructor.from_openai(client, mode=instructor.Mode.JSON)
    assert plain.create(response_model=Anything, logit_bias=EMPTY_OBJECT, **fields).color == "red"


NASTY = {
    "guided_json": [
        {"enum": [f"value {i}" for i in range(10_000)]},
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2500)}},
        {"description": "x" * 2**20},
        {"items": {"type": "string", "pattern": "((("}},
    ],
    "guided_regex": ["(" * 20_000, "(a", "[z-a]"],
    "guided_grammar": ["root ::= root", 'root ::= s\ns ::= s s s s | s s | "a" | [a-z] | ""', "no grammar"],
    "guided_choice": [["x"] * 10_000],
}


def test_nasty_ones_are_refused_and_others_go_on(client):
    """Those that are refused at once, that take too long, and that would be slow at each token, all at a time."""
    asked = [(name, value) for name, values in NASTY.items() for value in values]

    def refused(name: str, value: Any) -> str:
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, **{name: value})
        assert caught.value.param.startswith(name)
        return caught.value.message

    with ThreadPoolExecutor(len(asked) + 1) as pool:
        messages = [pool.submit(refused, name, value) for name, value in asked]
        assert text_of(ask(client, n=2))
        assert all(message.result() for message in messages)
    assert text_of(ask(client, guided_json={"enum": [f"value {i}" for i in range(5000)]})).startswith('"value ')


def test_one_that_explodes_in_the_middle_of_an_answer_ends_alone(client):
    """Behind a prefix that is longer than what is tried out, texts of it can be read in ever more ways."""
    rules = "".join(
        f"s{i} ::= s{i * 7 % 20} s{(i + 3) % 20} | s{i * 3 % 20} s{(i + 8) % 20} | [ab]\n" for i in range(20)
    )
    late = f'root ::= "{"x" * 200}" s0\n{rules}'
    with ThreadPoolExecutor(1) as pool:
        refused = pool.submit(ask, client, structured_outputs={"grammar": late}, n=8, max_tokens=400)
        assert text_of(ask(client, guided_choice=["yes", "no"])) in ("yes", "no")
        with pytest.raises(openai.BadRequestError, match="in too many ways") as caught:
            refused.result()
    assert caught.value.param == "structured_outputs.grammar"
    assert text_of(ask(client, guided_choice=["yes", "no"])) in ("yes", "no")


PROMPTS = ["What is a red circle?", "Where is the star?", "Name a color.", "What do you see? " * 12, "Hello", "Count."]
FORMS: list[dict[str, Any]] = [
    {"structured_outputs": {"json": SCHEMA}},
    {},
    {"structured_outputs": {"regex": "[a-z ]{8,40}[0-9]"}, "repetition_penalty": 1.3},
]
SCHEDULES: list[dict[str, Any]] = [
    {"disable_overlap_schedule": True},
    {},
    {"chunked_prefill_size": 16, "enable_mixed_chunk": False},
    {"chunked_prefill_size": 16, "max_total_tokens": 256, "max_model_len": 200, "schedule_conservativeness": 0.1},
    {"disable_radix_cache": True, "speculative_algorithm": "ngram"},
]


@pytest.mark.slow
def test_answers_do_not_depend_on_the_schedule(default_model):
    found = []
    for settings in SCHEDULES:
        with LLM(default_model, num_threads=1, page_size=4, **{"max_total_tokens": 4096, **settings}) as llm:
            answers = []
            for form in FORMS:
                answers += [a.text for a in llm.chat_batch(PROMPTS, temperature=0.0, max_tokens=70, **form)]
            answers += [a.text for a in llm.chat_batch(PROMPTS, temperature=1.0, seed=3, max_tokens=70, **FORMS[0])]
            found.append(answers)
            assert (llm.stats().retracted_total > 0) == ("max_model_len" in settings)
    assert all(other == found[0] for other in found[1:])
    for text in found[0][: len(PROMPTS)] + found[0][-len(PROMPTS) :]:
        assert Shape.model_validate_json(text)
