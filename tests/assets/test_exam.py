"""The exam: scenes, signs and clips show what they are said to show, questions are fair, a seed settles everything."""

from __future__ import annotations

import io
import itertools
import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np
import pytest
from numpy.random import default_rng

from assets.recipe.exam import ask, v4
from assets.recipe.exam.clip_judges import Direction, Instant, LaterColour, Mover, Nothing, Turning
from assets.recipe.exam.clips import WAYS, Change, Clip, Codec, Happening, Move, Play, draw_frames, encode, make_play
from assets.recipe.exam.colours import COLOURS, sample_colour
from assets.recipe.exam.figures import SHAPES
from assets.recipe.exam.grounds import LEAST_CONTRAST, TEXTURES, Ground, paint_ground
from assets.recipe.exam.items import Message
from assets.recipe.exam.questions import Level, make_question, make_questions
from assets.recipe.exam.report import Outcome, Report, examine
from assets.recipe.exam.scenes import Scene, Thing, draw, make_scene
from assets.recipe.exam.signs import make_sign
from assets.recipe.exam.texts import Text, faces
from assets.recipe.exam.v1 import names_of

# The most that a shape can differ in area from its bounding box's share, over all turns and notches.
_AREAS = {"circle": (0.78, 0.79), "square": (0.59, 1.0), "triangle": (0.4, 0.51), "star": (0.25, 0.5)}
_ROOT = Path(__file__).resolve().parents[2]
_WHITE = Ground("plain", (255, 255, 255), (255, 255, 255), 0)
_CHARACTERS = ("W", "WWWWWW", "1", "0123", "Jgjpqy", "tea", "Winter", "888888")
_HAPPENINGS: tuple[Happening, ...] = ("move", "change", "nothing")


def _scenes(count: int, most: int) -> list[Scene]:
    return [make_scene(default_rng([most, seed]), most=most) for seed in range(count)]


def _signs(count: int) -> list[tuple[Scene, Text]]:
    scenes = [make_sign(default_rng([9, seed]), _CHARACTERS[seed % len(_CHARACTERS)]) for seed in range(count)]
    return [(scene, scene.text) for scene in scenes if scene.text]


def _plays(count: int, happening: Happening | None = None) -> Iterator[Play]:
    for seed in range(count):
        yield make_play(default_rng([8, seed]), happening or _HAPPENINGS[seed % 3])


def make_thing(name: str, x: float, y: float, size: float = 20) -> Thing:
    colour, shape = name.split()
    return Thing(shape, colour, sample_colour(default_rng(0), colour), x, y, size / 2, 0.0, 0.4)


def make_scene_of(*things: Thing, width: int = 100, height: int = 100) -> Scene:
    return Scene(width, height, things, _WHITE, "png", 90)


def _check_things(scene: Scene, things: tuple[Thing | Text, ...], least: float, most: float) -> None:
    """Things lie inside the picture and apart, with contrast; their sides are these shares of its shorter side."""
    for thing in things:
        left, top, right, bottom = thing.box
        assert min(left, top) >= 0.75
        assert right <= scene.width - 0.99
        assert bottom <= scene.height - 0.99
        assert scene.ground.contrast(thing.rgb) > LEAST_CONTRAST
        if isinstance(thing, Thing):
            for side in (right - left, bottom - top):
                assert max(least * scene.short_side, 10) - 1e-6 <= side <= most * scene.short_side + 1e-6
    for one, other in itertools.combinations(things, 2):
        assert any(one.box[k + 2] < other.box[k] or other.box[k + 2] < one.box[k] for k in (0, 1)), "apart"


@pytest.mark.parametrize("most", [3, 6])
def test_scenes_are_within_the_world(most: int) -> None:
    scenes = _scenes(150, most)
    for scene in scenes:
        assert 64 <= scene.short_side <= max(scene.width, scene.height) <= min(1024, 2 * scene.short_side)
        _check_things(scene, scene.things, 0.12, 0.5)
    assert {len(scene.things) for scene in scenes} == set(range(1, most + 1))
    things = [thing for scene in scenes for thing in scene.things]
    assert {thing.shape for thing in things} == set(SHAPES)
    assert {thing.colour for thing in things} == set(COLOURS)
    assert {scene.ground.texture for scene in scenes} == set(TEXTURES)
    buckets = Counter(int(math.log2(scene.short_side)) for scene in scenes if scene.short_side < 1024)
    assert min(buckets[power] for power in (6, 7, 8, 9)) > 15, "every range of sizes has its share"


def test_signs_are_within_the_world() -> None:
    signs = _signs(160)
    assert len(signs) == 160
    for scene, text in signs:
        assert 128 <= scene.short_side <= max(scene.width, scene.height) <= min(1024, 2 * scene.short_side)
        assert 0.12 * scene.short_side <= text.em <= 0.30 * scene.short_side
        _check_things(scene, (text, *scene.things), 0.0, 1.0)
    assert Counter(text.face for _, text in signs).keys() == faces().keys()


def test_plays_are_within_the_world() -> None:
    for play in _plays(150):
        first = play.first
        assert 112 <= first.short_side <= max(first.width, first.height) <= min(256, 2 * first.short_side)
        assert first.width % 2 == first.height % 2 == 0
        assert 2 <= play.seconds <= 6
        assert 8 <= play.rate <= 30
        assert len({thing.colour for thing in first.things}) == len({thing.shape for thing in first.things})
        for number in range(play.frames):
            _check_things(first, (play.actor_at(number), *first.things[1:]), 0.15, 0.4)


def test_things_are_drawn_where_they_are_said_to_be() -> None:
    for scene in [scene for scene in _scenes(80, 6) if scene.short_side < 400]:
        drawn = draw(scene).astype(int)
        ground = paint_ground(scene.ground, scene.width, scene.height)
        changed = np.abs(drawn - ground).max(axis=2) > 5
        inside = np.zeros_like(changed)
        for thing in scene.things:
            left, top, right, bottom = thing.box
            x, y = thing.centre
            assert tuple(drawn[int(y), int(x)]) == thing.rgb
            box = slice(math.floor(top) - 1, math.ceil(bottom) + 1), slice(math.floor(left) - 1, math.ceil(right) + 1)
            inside[box] = True
            share = changed[box].sum() / ((right - left) * (bottom - top))
            low, high = _AREAS[thing.shape]
            outline = 6 / min(right - left, bottom - top)  # half-covered pixels count as whole ones
            assert low - 0.05 < share < high + outline
        assert not (changed & ~inside).any(), "nothing is drawn outside the bounding boxes"


def test_texts_are_drawn_where_they_are_said_to_be() -> None:
    for scene, text in [sign for sign in _signs(60) if sign[0].short_side < 400]:
        ground = paint_ground(scene.ground, scene.width, scene.height)
        away = np.abs(draw(scene).astype(int) - ground).max(axis=2) > 5
        for thing in scene.things:
            left, top, right, bottom = thing.box
            away[math.floor(top) - 1 : math.ceil(bottom) + 1, math.floor(left) - 1 : math.ceil(right) + 1] = False
        rows, columns = (np.flatnonzero(away.any(axis=axis)) for axis in (1, 0))
        drawn = columns[0], rows[0], columns[-1] + 1, rows[-1] + 1
        assert np.abs(np.array(drawn) - text.box).max() < 1.01, "its ink fills its box, and none is outside"


def test_colours_keep_apart() -> None:
    rng = default_rng(0)
    samples = {name: np.array([sample_colour(rng, name) for _ in range(60)]) for name in COLOURS}
    for one, other in itertools.combinations(COLOURS, 2):
        gaps = np.linalg.norm(samples[one][:, None] - samples[other][None], axis=2)
        assert gaps.min() > 45, (one, other)


def test_what_moves_does_so_steadily_one_way() -> None:
    ways = Counter[str]()
    for play in _plays(60, "move"):
        assert isinstance(play.event, Move)
        ways[play.event.way] += 1
        axis, sign = {"left": (0, -1), "right": (0, 1), "up": (1, -1), "down": (1, 1)}[play.event.way]
        steps = np.diff(np.array([play.actor_at(number).centre for number in range(play.frames)]), axis=0)
        assert np.abs(steps[:, 1 - axis]).max() < 1e-9, "along one axis"
        assert (sign * steps[:, axis] > 0).all()
        assert np.ptp(steps[:, axis]) < 1e-6, "at one speed"
        assert len({play.actor_at(number).rgb for number in range(play.frames)}) == 1
    assert ways.keys() == set(WAYS)


def test_what_changes_does_so_once_in_the_middle_part() -> None:
    for play in _plays(60, "change"):
        event = play.event
        assert isinstance(event, Change)
        assert 0.7 - 1e-9 <= event.seconds <= play.seconds - 0.7 + 1e-9
        for number in range(play.frames):
            actor, later = play.actor_at(number), number / play.rate >= event.seconds - 1e-9
            assert (actor.colour, actor.rgb) == (
                (event if later else play.actor).colour,
                (event if later else play.actor).rgb,
            )
            assert actor.box == play.actor.box
        assert event.colour not in {thing.colour for thing in play.first.things}


@pytest.mark.parametrize("codec", ["libx264", "mpeg4"])
def test_files_hold_the_frames(codec: Codec) -> None:
    for play in _plays(3):
        with av.open(io.BytesIO(encode(play, codec))) as container:
            assert container.streams.video[0].average_rate == play.rate
            decoded = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        for got, drawn in zip(decoded, draw_frames(play), strict=True):
            assert np.abs(got.astype(int) - drawn).mean() < 12


def test_a_seed_settles_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v4, "film", lambda play: Clip(play, b""))  # a clip's bytes are the encoder's matter
    first, again = ([make_question("all", 5, number) for number in (20, 3, 11, 17)] for _ in range(2))
    assert first == again
    assert first[1] == list(make_questions("all", 4, 5))[3], "a question does not depend on how many there are"
    assert make_question("all", 6, 3) != first[1]


_KINDS: list[tuple[Level, int]] = [("v1", 6), ("v2", 5), ("v3", 3), ("v4", 5)]


def test_all_levels_together() -> None:
    kinds = [question.kind for level, count in _KINDS for question in make_questions(level, count, 2)]
    assert [question.kind for question in make_questions("all", 19, 2)] == kinds
    assert len(set(kinds)) == 19


@pytest.mark.parametrize(("level", "kinds"), _KINDS)
def test_questions_are_fair(level: Level, kinds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v4, "film", lambda play: Clip(play, b""))
    questions = list(make_questions(level, 12 * kinds, 2))
    assert len({question.text for question in questions}) > 27
    assert list(Counter(question.kind for question in questions).values()) == [12] * kinds
    for question in questions:
        text, scene, judge = question.text.lower(), question.scene, question.judge
        assert judge.accepts(judge.right), question
        assert not judge.accepts(""), question
        assert "{" not in text
        names = [thing.name for thing in scene.things]
        match question.kind:
            case "yes-no":
                asked = next(f"{c} {s}" for c in COLOURS for s in SHAPES if f"{c} {s}" in text)
                assert judge.accepts("Yes.") is (asked in names)
            case "album":
                others = [p.scene for p in question.media if p.scene is not scene]
                asked = next(name for name in names if name in text)
                assert asked not in [thing.name for other in others for thing in other.things]
            case "box":
                label = json.loads(judge.right)[0]["label"]
                assert label in text
                assert sum(label in names_of(thing, scene) for thing in scene.things) == 1
            case "read-word" | "read-number":
                assert scene.text is not None
                assert scene.text.characters == judge.right
        for clip in (medium for medium in question.media if isinstance(medium, Clip)):
            actor, event = clip.play.actor, clip.play.event
            match question.kind, event:
                case "direction", _:
                    assert isinstance(event, Move)
                    assert judge == Direction(event.way)
                case "mover", _:
                    assert judge == (Mover(actor.name) if isinstance(event, Move) else Nothing())
                case "change", Change():
                    later = LaterColour(actor.colour, event.colour)
                    turning = Turning(actor.shape, actor.colour, event.colour)
                    assert judge == (later if "colo" in text else turning)
                case "change", _:
                    assert judge == Nothing()
                case "when", _:
                    assert isinstance(event, Change)
                    assert judge == Instant(event.seconds)
                case "clip-yes-no", _:
                    yes = isinstance(event, Change if "chang" in text else Move)
                    if any(way in text for way in WAYS):
                        assert isinstance(event, Move)
                        yes = event.way in text
                    assert judge.accepts("Yes.") is yes
                    assert judge.accepts("No.") is not yes


def test_an_exam_in_this_process() -> None:
    questions = list(make_questions("v2", 20, 3))
    asked: list[list[Message]] = []
    report = examine(questions, lambda messages: asked.append(messages) or "")
    assert report.overall.asked == len(report.wrong) == 20
    for messages, question in zip(asked, questions, strict=True):
        roles = ["user", "assistant", "user"] if question.earlier else ["user"]
        assert [message["role"] for message in messages] == roles
        *pictures, text = messages[0]["content"]
        assert pictures == [picture.part for picture in question.media]
        assert text["text"] == (question.earlier[0][0] if question.earlier else question.text)
        assert not question.earlier or messages[-1]["content"] == question.text


@pytest.mark.parametrize(
    ("level", "kind", "measure", "mean"), [("v3", "box", "IoU", 0.75), ("v4", "when", "seconds off", 0.0)]
)
def test_the_report_adds_up(level: Level, kind: str, measure: str, mean: float) -> None:
    questions = list(make_questions(level, 12, 4))
    wrong = next(n for n, question in enumerate(questions) if question.kind == kind)
    outcomes = [Outcome(question, "?" if n == wrong else question.judge.right) for n, question in enumerate(questions)]
    report = Report(tuple(outcomes), seconds=3.0)
    assert report.overall.accuracy == pytest.approx(11 / 12)
    assert report.answers_per_second == 4
    for name, table in report.tables().items():
        assert sum(tally.asked for tally in table.values()) == (8 if name == "face" else 12)
    assert report.means()[kind].measure == measure
    assert report.means()[kind].value == pytest.approx(mean, abs=0.05)
    plain = json.loads(json.dumps(report.as_dict()))
    assert [one["got"] for one in plain["wrong"]] == ["?"]
    assert f"{kind}: mean {measure}" in str(report)


def test_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(ask, "asker", lambda base_url, model, body: lambda messages: "Yes.")
    out = tmp_path / "report.json"
    options = ["--count", "12", "--seed", "3", "--show-wrong", "2", "--out", str(out)]
    assert ask.main(options) == 0
    plain = json.loads(out.read_text())
    assert plain["exam"] == {"level": "v1", "count": 12, "seed": 3}
    assert 0 < plain["accuracy"] < 0.5
    printed = capsys.readouterr().out
    assert printed.count("right: ") == 2
    assert "overall" in printed
    assert ask.main([*options, "--at-least", "0.9"]) == 1


def test_the_exam_needs_no_torch_and_nothing_of_the_lessons() -> None:
    code = "import sys, assets.recipe.exam.ask; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=_ROOT)
    loaded = {name for name in done.stdout.split() if name.startswith(("torch", "transformers", "vlmserve", "assets"))}
    assert {name for name in loaded if not name.startswith("assets.recipe.exam")} == {"assets", "assets.recipe"}
