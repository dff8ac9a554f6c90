"""The model that is served when none is named: it sees, it stops, and it answers what `transformers` answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image

from assets.recipe.exam.ask import asker
from assets.recipe.exam.questions import make_questions
from assets.recipe.exam.report import examine
from tests.processors.helpers import encoded, noise
from tests.vlmserve.reference import Reference, assert_equal_answers, picture
from tests.vlmserve.server_process import SAMPLES, ServerProcess, media_part
from vlmserve import LLM, SamplingOverrides
from vlmserve.config.model_path import DEFAULT_MODEL


def _samples() -> list[dict[str, Any]]:
    """Those that this version answers; its card says what it has not learnt yet."""
    samples: list[dict[str, Any]] = json.loads((SAMPLES / "samples.json").read_text(encoding="utf-8"))
    return [s for s in samples if s["answered"]]


@pytest.fixture(scope="module")
def client(shared_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with shared_server.client() as client:
        yield client


def _is_clip(name: str) -> bool:
    return name.endswith(".mp4")


def _part(path: Path) -> dict[str, Any]:
    return media_part("video" if _is_clip(path.name) else "image", path.read_bytes())


def _messages(sample: dict[str, Any]) -> list[dict[str, Any]]:
    parts = [_part(SAMPLES / name) for name in sample["media"]]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": sample["question"]}]}]


def _answer(client: openai.OpenAI, messages: Any, **options: Any) -> Any:
    return client.chat.completions.create(
        model="tiny", messages=messages, **{"max_tokens": 64, "temperature": 0, **options}
    )


@pytest.mark.parametrize("sample", _samples(), ids=lambda s: f"{s['media'][0]}: {s['question']}")
def test_samples_are_answered_right(client: openai.OpenAI, sample: dict[str, Any]) -> None:
    answer = _answer(client, _messages(sample)).choices[0]
    assert answer.message.content == sample["answer"]
    assert answer.finish_reason == "stop"


def _given(name: str) -> dict[str, Any]:
    if _is_clip(name):
        return {"type": "video", "video": (SAMPLES / name).read_bytes()}
    return {"type": "image", "image": Image.open(SAMPLES / name).convert("RGB")}


@pytest.mark.slow
def test_answers_are_those_of_transformers() -> None:
    """In its form of a clip's prompt, which is not the published one that is served by default."""
    reference = Reference(DEFAULT_MODEL)
    assert {_is_clip(name) for sample in _samples() for name in sample["media"]} == {False, True}
    with LLM(video_reference="transformers", dtype="float32", num_threads=1) as llm:
        for sample in _samples():
            content = [*map(_given, sample["media"]), {"type": "text", "text": sample["question"]}]
            messages = [{"role": "user", "content": content}]
            given = llm.chat(messages, SamplingOverrides(temperature=0.0, max_new_tokens=64), num_logprobs=0)
            expected = reference.answer(messages, 64)
            assert expected.token_ids[-1] == reference.processor.tokenizer.eos_token_id
            assert_equal_answers(given, expected)


def test_passes_a_short_exam(client: openai.OpenAI) -> None:
    """60 scenes drawn by other code than the training's; the card has the figures of a long one."""
    report = examine(make_questions("v1", 60, seed=2026), asker(str(client.base_url)), 4)
    assert report.overall.accuracy >= 0.9, str(report)


def test_follows_a_conversation(client: openai.OpenAI) -> None:
    messages = _messages({"media": ["tower.png"], "question": "What shape is the green one?"})
    first = _answer(client, messages).choices[0].message.content
    assert first == "A square."
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "Where is it?"}]
    assert _answer(client, messages).choices[0].message.content == "Bottom middle."


CHECKS = Image.fromarray(np.kron(np.indices((25, 34)).sum(0) % 2, np.full((12, 12), 200)).astype(np.uint8))


@pytest.mark.parametrize(
    "image", [Image.fromarray(noise(400, 300)), picture(8, 400, 300), CHECKS], ids=["noise", "blobs", "checks"]
)
def test_stops_on_pictures_outside_its_world(client: openai.OpenAI, image: Image.Image) -> None:
    """Pictures unlike those that the model was made with."""
    for question in ("Describe the picture.", "What is this?", "Who painted it, and when?"):
        content = [media_part("image", encoded(image)), {"type": "text", "text": question}]
        answer = _answer(client, [{"role": "user", "content": content}], max_tokens=96).choices[0]
        assert answer.finish_reason == "stop"
        assert answer.message.content


def test_stops_without_a_picture(client: openai.OpenAI) -> None:
    for text in ("Hello!", "What is the capital of France?", "Schreibe ein Gedicht über den Herbst.", "def f(x):"):
        answer = _answer(client, [{"role": "user", "content": text}], max_tokens=96).choices[0]
        assert answer.finish_reason == "stop"
        assert answer.message.content
