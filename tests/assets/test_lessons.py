"""What is taught is what is served, and a row of many dialogues teaches what as many prompts would."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from assets.recipe.batches import batches, collate
from assets.recipe.clips import make_clip
from assets.recipe.lessons import Lesson, Teacher, see, watch
from assets.recipe.losses import Hinter, losses
from assets.recipe.network import Network, make_network, write_checkpoint
from assets.recipe.paint import paint
from assets.recipe.plan import PLAN
from assets.recipe.sizes import MERGE
from assets.recipe.tokenizer import make_recipe_tokenizer
from assets.recipe.wording import about_clip, in_order, side
from assets.recipe.world import COLOURS, SHAPES, Scene, Thing, make_scene, make_thing, pick_colour
from processors.families.base import ExpandedPrompt
from processors.families.registry import make_processor
from processors.video.options import VideoKnobs
from tests.processors.helpers import values
from vlmserve.frontend.chat_template import load_chat_template
from vlmserve_common.checkpoint.reader import read_json
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


def test_prompt_and_patches_are_those_that_are_served(tokenizer: Tokenizer, network: Network, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, network, tokenizer)
    rng = np.random.default_rng(5)
    scene = make_scene(rng, 2)
    picture = paint(scene)
    seen = see(picture, scene)
    lesson = Teacher(tokenizer, {"scene": 1.0}, 200)._row(
        np.random.default_rng(1), [seen], [[("Where is it?", "Top left.")]], [], question_first=False
    )
    processor = make_processor(tmp_path, read_json(tmp_path, "config.json"))
    processed = processor.process_image(picture)
    np.testing.assert_array_equal(values(processed).astype(np.float16), seen.patches)
    content = [{"type": "image"}, {"type": "text", "text": "Where is it?"}]
    prompt = load_chat_template(tmp_path).render([{"role": "user", "content": content}])
    _assert_begins_with(lesson, processor.expand(tokenizer.encode(prompt).ids, [processed]))


def _assert_begins_with(lesson: Lesson, served: ExpandedPrompt) -> None:
    """The lesson, up to its first answer, is the prompt that is served."""
    length = int(np.argmax(lesson.taught))
    assert served.input_ids.tolist() == lesson.ids[:length].tolist()
    assert served.mm_inputs is not None
    np.testing.assert_array_equal(served.mm_inputs.mrope_positions, lesson.positions[:, :length])


def test_clips_are_those_that_are_served(tokenizer: Tokenizer, network: Network, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, network, tokenizer)
    clip = make_clip(np.random.default_rng(6))
    clip = dataclasses.replace(clip, times=tuple(k / 2 for k in range(len(clip.frames))))
    seen = watch(clip, np.random.default_rng(0))  # this seed wears nothing
    lesson = Teacher(tokenizer, {"clip": 1.0}, 400)._row(
        np.random.default_rng(1), seen, [[("What moves?", "Nothing moves.")]], [], question_first=False
    )
    continue_text = load_text_tokenizer(tmp_path).continue_text
    processor = make_processor(tmp_path, read_json(tmp_path, "config.json"), continue_text=continue_text)
    processed = processor.process_video([paint(frame) for frame in clip.frames], VideoKnobs(fps=2.0))
    np.testing.assert_array_equal(values(processed).astype(np.float16), np.concatenate([s.patches for s in seen]))
    content = [{"type": "video"}, {"type": "text", "text": "What moves?"}]
    prompt = load_chat_template(tmp_path).render([{"role": "user", "content": content}])
    _assert_begins_with(lesson, processor.expand(tokenizer.encode(prompt).ids, [processed]))


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


def test_hints_tell_what_is_where() -> None:
    rng = np.random.default_rng(0)
    red = make_thing("star", "red", pick_colour("red", rng), (48.0, 112.0), 40, rng)
    scene = Scene(width=192, height=224, background=(255, 255, 255), texture="plain", strength=0, seed=0, things=(red,))
    seen = see(paint(scene), scene)
    rows, columns = seen.grid[1] // MERGE, seen.grid[2] // MERGE
    assert (rows, columns) == (7, 6)
    things = seen.hints.things.reshape(rows, columns)
    assert things[3, 1] == 1 + len(COLOURS) * SHAPES.index("star") + COLOURS.index("red")
    assert things[0].max() == 0
    assert seen.hints.offsets.reshape(rows, columns, 4)[3, 1] == pytest.approx([0, 0, 40 / 32, 40 / 32], abs=0.15)
    outline = seen.hints.outline.reshape(rows, columns, MERGE, MERGE, 4, 4)
    assert outline[3, 1].mean() > 60
    assert outline[0].max() == 0
    middle, corner, opposite = seen.hints.places.reshape(rows, columns, 3, 2)[3, 1]
    assert middle == pytest.approx([48 / 192, 112 / 224])
    assert corner == pytest.approx([red.box[0] / 192, red.box[1] / 224])
    assert opposite == pytest.approx([red.box[2] / 192, red.box[3] / 224])


def test_sides_and_orders_are_true() -> None:
    left, right = _named("red circle", (30.0, 90.0)), _named("blue star", (140.0, 40.0))
    scene = Scene(
        width=192, height=128, background=(255, 255, 255), texture="plain", strength=0, seed=0, things=(left, right)
    )
    told = [side(scene, np.random.default_rng(seed)) for seed in range(60)]
    found = [turn for dialogue in told if dialogue for turn in dialogue]
    assert {answer for _, answer in found} == {"Left.", "Right.", "Above.", "Below."}
    for question, answer in found:
        words = question.lower()
        of_star = max(words.find("star"), words.find("blue")) < max(words.find("circle"), words.find("red"))
        if ": where is" in words:  # "Left of the circle, or right: where is the star?"
            of_star = not of_star
        assert answer in (("Right.", "Above.") if of_star else ("Left.", "Below.")), question
    orders = {
        answer
        for seed in range(60)
        for turns in [in_order(scene, np.random.default_rng(seed))]
        if turns
        for _, answer in turns
    }
    assert orders == {"Red circle, blue star.", "Blue star, red circle."}
    turns = next(
        t for s in range(99) for t in [in_order(scene, np.random.default_rng(s))] if t and "top to bottom" in t[0][0]
    )
    assert turns[0][1] == "Blue star, red circle."


def _named(name: str, centre: tuple[float, float]) -> Thing:
    colour, shape = name.split()
    rng = np.random.default_rng(0)
    return make_thing(shape, colour, pick_colour(colour, rng), centre, 30, rng)  # type: ignore[arg-type]


def test_a_colour_at_a_time_is_that_of_the_frames_with_that_label() -> None:
    clip = next(c for s in range(99) for c in [make_clip(np.random.default_rng(s))] if c.event == "colour")
    seen = watch(clip, np.random.default_rng(0))
    pairs = [{frame.things[0].colour for frame in clip.frames[k : k + 2]} for k in range(0, len(clip.frames), 2)]
    colours = {f"{part.seconds:.1f}": names for part, names in zip(seen, pairs, strict=True)}
    dialogues = [d for s in range(400) for d in [about_clip(clip, np.random.default_rng(s))] if d]
    asked = set()
    for ((question, answer),) in dialogues:
        found = re.search(r"at (\d+\.\d) seconds", question, re.IGNORECASE)
        if found is None:
            continue
        asked.add(answer)
        (colour,) = colours[found[1]]  # never of a label whose two frames differ
        named = re.search(rf"is the {clip.thing.shape} (\w+)", question, re.IGNORECASE)
        if answer in ("Yes.", "No."):
            assert named is not None
            assert answer == ("Yes." if named[1] == colour else "No.")
        else:
            assert answer == f"{colour.capitalize()}."
    assert asked == {"Yes.", "No.", f"{clip.thing.colour.capitalize()}.", f"{clip.later_colour.capitalize()}."}
