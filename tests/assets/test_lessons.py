"""What is taught is what is served, a row of many dialogues teaches what as many prompts would, and a run
goes on where it was stopped."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer

from assets.recipe.batches import batches, collate
from assets.recipe.clips import make_clip
from assets.recipe.lessons import Lesson, Seen, Teacher, see, watch
from assets.recipe.losses import Hinter, losses
from assets.recipe.network import Network, make_network, write_checkpoint
from assets.recipe.paint import paint
from assets.recipe.plan import PLAN, stage_at
from assets.recipe.tokenizer import make_recipe_tokenizer
from assets.recipe.train import Run
from assets.recipe.world import make_scene
from processors.families.registry import make_processor
from processors.video.options import VideoKnobs
from tests.processors.helpers import values
from vlmserve import LLM, SamplingOverrides
from vlmserve.frontend.chat_template import load_chat_template
from vlmserve_common.checkpoint.fields import read_json
from vlmserve_common.checkpoint.text_tokenizer import load_text_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return make_recipe_tokenizer()


@pytest.fixture(scope="module")
def network(tokenizer: Tokenizer) -> Network:
    return make_network(tokenizer, 0).eval()


def _lesson(tokenizer: Tokenizer, kind: str, seed: int, budget: int = 160) -> Lesson:
    return Teacher(tokenizer, {kind: 1.0}, budget).lesson(np.random.default_rng(seed))


def _answers_loss(network: Network, lessons: list[Lesson]) -> float:
    with torch.no_grad():
        return losses(network, Hinter(network.config.text_config.hidden_size), collate(lessons))[0].item()


@pytest.mark.parametrize("kind", ["scene", "album", "clip", "talk"])
def test_branches_are_taught_as_if_alone(tokenizer: Tokenizer, network: Network, kind: str) -> None:
    lesson = next(x for s in range(20) for x in [_lesson(tokenizer, kind, s)] if x.branches.max() > 2)
    whole = _answers_loss(network, [lesson]) * lesson.taught.sum()
    alone = 0.0
    for branch in range(1, lesson.branches.max() + 1):
        keep = (lesson.branches == 0) | (lesson.branches == branch)
        one = dataclasses.replace(
            lesson,
            ids=lesson.ids[keep],
            branches=np.zeros(keep.sum(), int),
            taught=lesson.taught[keep],
            positions=lesson.positions[:, keep],
            visual=lesson.visual[keep],
        )
        alone += _answers_loss(network, [one]) * one.taught.sum()
    assert whole == pytest.approx(alone, rel=1e-4)


def test_padding_and_neighbours_change_nothing(tokenizer: Tokenizer, network: Network) -> None:
    lessons = [_lesson(tokenizer, kind, 3) for kind in ("scene", "talk", "album")]
    counts = [lesson.taught.sum() for lesson in lessons]
    alone = sum(_answers_loss(network, [x]) * n for x, n in zip(lessons, counts, strict=True))
    assert _answers_loss(network, lessons) * sum(counts) == pytest.approx(alone, rel=1e-4)


def _picture() -> tuple[list[Seen], Any]:
    scene = make_scene(np.random.default_rng(5), 2)
    picture = paint(scene)
    return [see(picture, scene)], picture


def _clip() -> tuple[list[Seen], Any]:
    clip = make_clip(np.random.default_rng(6))
    clip = dataclasses.replace(clip, times=tuple(k / 2 for k in range(len(clip.frames))))
    return watch(clip, np.random.default_rng(0)), [paint(frame) for frame in clip.frames]  # this seed wears nothing


@pytest.mark.parametrize(("kind", "make"), [("image", _picture), ("video", _clip)])
def test_prompt_and_patches_are_those_that_are_served(
    tokenizer: Tokenizer, network: Network, tmp_path: Path, kind: str, make: Callable[[], tuple[list[Seen], Any]]
) -> None:
    write_checkpoint(tmp_path, network, tokenizer)
    seen, medium = make()
    teacher = Teacher(tokenizer, {"scene" if kind == "image" else "clip": 1.0}, 400)
    lesson = teacher._row(np.random.default_rng(1), seen, [[("What is it?", "Red.")]], [], question_first=False)
    continue_text = load_text_tokenizer(tmp_path).continue_text
    processor = make_processor(tmp_path, read_json(tmp_path, "config.json"), continue_text=continue_text)
    clip = kind == "video"
    processed = processor.process_video(medium, VideoKnobs(fps=2.0)) if clip else processor.process_image(medium)
    np.testing.assert_array_equal(values(processed).astype(np.float16), np.concatenate([s.patches for s in seen]))
    content = [{"type": kind}, {"type": "text", "text": "What is it?"}]
    prompt = load_chat_template(tmp_path).render([{"role": "user", "content": content}])
    served = processor.expand(tokenizer.encode(prompt).ids, [processed])
    length = int(np.argmax(lesson.taught))
    assert served.input_ids.tolist() == lesson.ids[:length].tolist(), "up to its first answer"
    assert served.mm_inputs is not None
    np.testing.assert_array_equal(served.mm_inputs.mrope_positions, lesson.positions[:, :length])


def test_the_same_batches_wherever_one_goes_on(tokenizer: Tokenizer) -> None:
    stage = dataclasses.replace(PLAN[-1], batch=2, budget=120)
    whole = list(batches(tokenizer, stage, seed=1, first=0, end=3, workers=0))
    rest = list(batches(tokenizer, stage, seed=1, first=2, end=3, workers=0))
    assert len(whole) == 3
    for name in ("ids", "patches", "positions"):
        assert torch.equal(getattr(whole[2], name), getattr(rest[0], name))
    assert torch.equal(whole[2].hints["outline"], rest[0].hints["outline"])
    assert not torch.equal(whole[1].ids, whole[2].ids)


def test_some_batches_only_look(tokenizer: Tokenizer) -> None:
    stage = dataclasses.replace(PLAN[-1], batch=2, budget=120, look_every=3, looks={"page": 1.0})
    found = list(batches(tokenizer, stage, seed=1, first=2, end=7, workers=0))
    assert [bool(batch.taught.any()) for batch in found] == [True, False, True, True, False]
    assert [len(batch.ids) for batch in found] == [2, 4, 2, 2, 4]
    assert all((batch.hints["characters"] > 0).any() for batch in found if not batch.taught.any())


TINY = (
    dataclasses.replace(PLAN[0], steps=2, batch=1),
    dataclasses.replace(PLAN[1], steps=2, batch=1, budget=90, decay=0),
)


def _train(folder: Path, until: int) -> Run:
    run = Run(folder, seed=3, device="cpu", plan=TINY)
    while run.step < until:
        run.train_stage(until=until, save_every=100, workers=0)
    return run


@pytest.mark.slow
def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    whole = _train(tmp_path / "whole", 4)
    for until in (1, 3, 4):
        parts = _train(tmp_path / "parts", until)
    assert parts.step == whole.step == 4
    for name, weight in whole.network.state_dict().items():
        assert torch.equal(weight, parts.network.state_dict()[name]), name
        assert torch.equal(whole.average[name], parts.average[name]), name
    with LLM(str(tmp_path / "parts" / "checkpoint"), max_total_tokens=512) as llm:
        picture = {"type": "image", "image": Image.new("RGB", (80, 80), "red")}
        answer = llm.chat([{"role": "user", "content": [picture]}], SamplingOverrides(max_new_tokens=3))
    assert answer.prompt_tokens > 25, "a small picture is enlarged to at least 25 tokens"


def test_stages_follow_each_other() -> None:
    assert [stage_at(step, TINY)[0].name for step in range(5)] == ["look", "look", "shapes", "shapes", "shapes"]
    assert stage_at(3, TINY)[1] == 2
