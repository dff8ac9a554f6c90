"""Thoughts in answers, and what a request says about thinking."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.vlmserve.api.fake_engine import BODY, CHAT, Served, serving, write_checkpoint_folder
from tests.vlmserve.api.test_generation import chat, finishes, joined, stream

TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif -%}
{{ message.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
<think>
{% if enable_thinking is defined and not enable_thinking %}
</think>

{% endif %}"""
ANSWER = "It is a list.\nOf files.\n</think>\n\nA list."


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model whose prompts begin its thoughts."""
    folder = write_checkpoint_folder(tmp_path_factory.mktemp("thinker"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with serving(folder) as served:
        yield served


@pytest.fixture(scope="module")
def client(thinker: Served) -> Iterator[TestClient]:
    with TestClient(thinker.app, raise_server_exceptions=False) as client:
        yield client


def message_of(answer: dict[str, Any]) -> tuple[str | None, str | None]:
    message = answer["choices"][0]["message"]
    return message.get("reasoning_content"), message["content"]


def test_thoughts_and_answer(client, thinker):
    thinker.scheduler.say(ANSWER)
    answer = chat(client, max_tokens=100)
    assert message_of(answer) == ("It is a list.\nOf files.", "A list.")
    tokens = thinker.scheduler.tokenizer.encode("It is a list.\nOf files.\n</think>")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": len(tokens)}
    assert "warnings" not in answer


def test_streamed(client, thinker):
    thinker.scheduler.say(ANSWER)
    chunks = stream(client, max_tokens=100, stream_options={"include_usage": True})
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "It is a list.\nOf files."
    assert joined(chunks) == "A list."
    assert finishes(chunks) == ["stop"]
    assert chunks[-1]["usage"] == chat(client, max_tokens=100)["usage"]


def test_thoughts_that_do_not_end(client, thinker):
    thinker.scheduler.say(ANSWER)
    answer = chat(client, max_tokens=3)
    reasoning, content = message_of(answer)
    assert "It is a list.".startswith(reasoning)
    assert content == ""
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


@pytest.mark.parametrize("fields", [{"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}])
def test_without_thinking(client, thinker, fields):
    thinker.scheduler.say("A list.")
    answer = chat(client, **fields)
    assert message_of(answer) == (None, "A list.")
    assert thinker.prompt.endswith("<think>\n</think>\n\n")
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


@pytest.mark.parametrize(
    ("effort", "warns"), [("minimal", True), ("low", True), ("medium", False), ("high", True), ("xhigh", True)]
)
def test_degrees_of_thinking_are_on(client, thinker, effort, warns):
    answer = chat(client, reasoning_effort=effort)
    assert thinker.prompt.endswith("<think>\n")
    assert bool(answer.get("warnings")) == warns
    chat(client, reasoning_effort=effort, chat_template_kwargs={"enable_thinking": False})
    assert thinker.prompt.endswith("</think>\n\n")


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_thoughts_that_are_sent_back(client, thinker, name):
    earlier = {"role": "assistant", "content": "A list.", name: "It is."}
    again = {"role": "user", "content": "more"}
    chat(client, messages=[{"role": "user", "content": "hi"}, earlier, again])
    assert "<|im_start|>assistant\n<think>It is.</think>A list.<|im_end|>" in thinker.prompt


def test_variables_that_the_template_does_not_know(client):
    answer = chat(client, chat_template_kwargs={"enable_thinkin": False})
    [warning] = answer["warnings"]
    assert "chat_template_kwargs.enable_thinkin " in warning


def test_a_model_that_cannot_think_or_not_think(serve, tmp_path):
    for template, effort, warning in (
        ("{{ messages[0].content }}", "none", None),
        ("{{ messages[0].content }}", "low", "does not think"),
        ("{{ messages[0].content }}<think>", "none", "always thinks"),
        ("{{ messages[0].content }}{{ reasoning_effort }}", "low", None),
    ):
        folder = write_checkpoint_folder(tmp_path)
        (folder / "chat_template.jinja").write_text(template)
        served, client = serve(folder=folder)
        with client:
            reply = client.post(CHAT, json={**BODY, "max_tokens": 1, "reasoning_effort": effort}).json()
        assert [warning in line for line in reply.get("warnings", [])] == ([] if warning is None else [True])
        assert served.prompt == ("hilow" if "reasoning_effort" in template else template[25:].join(["hi", ""]))


def test_thoughts_stay_where_they_are_not_looked_for(serve, tmp_path):
    folder = write_checkpoint_folder(tmp_path)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    served, client = serve(folder=folder, reasoning_parser="none")
    served.scheduler.say(ANSWER)
    with client:
        answer = chat(client, max_tokens=100)
    assert message_of(answer) == (None, ANSWER)
    assert "completion_tokens_details" not in answer["usage"]
