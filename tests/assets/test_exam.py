"""The exam: scenes keep their promises, judges tell right from wrong, a seed settles everything."""

from __future__ import annotations

import io
import itertools
import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from numpy.random import default_rng
from PIL import Image

from assets.recipe.exam import ask, v1, v4
from assets.recipe.exam.clips import Clip
from assets.recipe.exam.colours import COLOURS, sample_colour
from assets.recipe.exam.figures import SHAPES
from assets.recipe.exam.grounds import LEAST_CONTRAST, TEXTURES, Ground, paint_ground
from assets.recipe.exam.items import Message
from assets.recipe.exam.judges import AllThings, Judge, Number, OtherThing, Place, WhichPicture, Word, YesNo
from assets.recipe.exam.questions import Level, make_question, make_questions
from assets.recipe.exam.report import Outcome, Report, examine
from assets.recipe.exam.scenes import Scene, Thing, draw, make_scene, take_picture

# The most that a shape can differ in area from its bounding box's share, over all turns and notches.
_AREAS = {"circle": (0.78, 0.79), "square": (0.59, 1.0), "triangle": (0.4, 0.51), "star": (0.25, 0.5)}
_ROOT = Path(__file__).resolve().parents[2]
_WHITE = Ground("plain", (255, 255, 255), (255, 255, 255), 0)


def _scenes(count: int, most: int) -> list[Scene]:
    return [make_scene(default_rng([most, seed]), most=most) for seed in range(count)]


def _thing(name: str, x: float, y: float, size: float = 20) -> Thing:
    colour, shape = name.split()
    return Thing(shape, colour, sample_colour(default_rng(0), colour), x, y, size / 2, 0.0, 0.4)


def _scene(*things: Thing, width: int = 100, height: int = 100) -> Scene:
    return Scene(width, height, things, _WHITE, "png", 90)


@pytest.mark.parametrize("most", [3, 6])
def test_scenes_are_within_the_world(most: int) -> None:
    scenes = _scenes(150, most)
    for scene in scenes:
        assert 64 <= scene.short_side <= max(scene.width, scene.height) <= min(1024, 2 * scene.short_side)
        assert scene.file_format in ("jpeg", "png")
        assert 60 <= scene.quality <= 95
        for thing in scene.things:
            left, top, right, bottom = thing.box
            assert left >= 0.99
            assert top >= 0.99
            assert right <= scene.width - 0.99
            assert bottom <= scene.height - 0.99
            for side in (right - left, bottom - top):
                assert max(0.12 * scene.short_side, 10) - 1e-6 <= side <= 0.5 * scene.short_side + 1e-6
            assert abs(math.degrees(thing.turn)) <= 20
            assert scene.ground.contrast(thing.rgb) > LEAST_CONTRAST
        for one, other in itertools.combinations(scene.things, 2):
            assert any(one.box[axis + 2] < other.box[axis] or other.box[axis + 2] < one.box[axis] for axis in (0, 1)), (
                "bounding boxes apart"
            )
    assert {len(scene.things) for scene in scenes} == set(range(1, most + 1))
    things = [thing for scene in scenes for thing in scene.things]
    assert {thing.shape for thing in things} == set(SHAPES)
    assert {thing.colour for thing in things} == set(COLOURS)
    assert {scene.ground.texture for scene in scenes} == set(TEXTURES)
    buckets = Counter(int(math.log2(scene.short_side)) for scene in scenes if scene.short_side < 1024)
    assert min(buckets[power] for power in (6, 7, 8, 9)) > 15, "every range of sizes has its share"


def test_things_are_drawn_where_they_are_said_to_be() -> None:
    for scene in [scene for scene in _scenes(80, 6) if scene.short_side < 400]:
        drawn = draw(scene).astype(int)
        ground = paint_ground(scene.ground, scene.width, scene.height)
        changed = np.abs(drawn - ground).max(axis=2) > 5
        assert drawn.shape == (scene.height, scene.width, 3)
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


def test_every_pixel_of_the_background_contrasts() -> None:
    for scene in [scene for scene in _scenes(60, 3) if scene.short_side < 256]:
        ground = paint_ground(scene.ground, scene.width, scene.height)
        for thing in scene.things:
            assert np.linalg.norm(ground - np.array(thing.rgb), axis=2).min() > LEAST_CONTRAST - 0.01


def test_colours_keep_apart() -> None:
    rng = default_rng(0)
    samples = {name: np.array([sample_colour(rng, name) for _ in range(60)]) for name in COLOURS}
    assert samples["black"].max() <= 30
    assert samples["white"].min() >= 235
    for one, other in itertools.combinations(COLOURS, 2):
        gaps = np.linalg.norm(samples[one][:, None] - samples[other][None], axis=2)
        assert gaps.min() > 45, (one, other)


def test_files_hold_the_drawing() -> None:
    formats = set()
    for scene in [scene for scene in _scenes(30, 3) if scene.short_side < 300]:
        picture = take_picture(scene)
        with Image.open(io.BytesIO(picture.data)) as image:
            assert image.format == scene.file_format.upper()
            difference = np.abs(np.asarray(image.convert("RGB")).astype(int) - draw(scene))
        assert difference.mean() < (0.01 if scene.file_format == "png" else 12)
        assert picture.url.startswith(f"data:image/{scene.file_format};base64,")
        formats.add(scene.file_format)
    assert formats == {"jpeg", "png"}


def test_a_seed_settles_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v4, "film", lambda play: Clip(play, b""))  # a clip's bytes are the encoder's matter
    first, again = ([make_question("all", 5, number) for number in (20, 3, 11, 17)] for _ in range(2))
    assert first == again
    assert first[1] == list(make_questions("all", 4, 5))[3], "a question does not depend on how many there are"
    assert make_question("all", 6, 3) != first[1]


def test_all_levels_together() -> None:
    levels: list[tuple[Level, int]] = [("v1", 6), ("v2", 5), ("v3", 3), ("v4", 5)]
    kinds = [question.kind for level, count in levels for question in make_questions(level, count, 2)]
    assert [question.kind for question in make_questions("all", 19, 2)] == kinds
    assert len(set(kinds)) == 19


@pytest.mark.parametrize(("level", "kinds"), [("v1", 6), ("v2", 5)])
def test_questions_are_fair(level: Level, kinds: int) -> None:
    questions = list(make_questions(level, 8 * kinds, 2))
    assert len({question.text for question in questions}) > 27
    assert list(Counter(question.kind for question in questions).values()) == [8] * kinds
    for question in questions:
        assert question.judge.accepts(question.judge.right), question
        assert not question.judge.accepts(""), question
        assert "{" not in question.text
        assert len(question.scene.things) <= (6 if question.kind in ("count-many", "relation") else 3)
        names = [thing.name for thing in question.scene.things]
        match question.kind:
            case "yes-no":
                asked = next(f"{c} {s}" for c in COLOURS for s in SHAPES if f"{c} {s}" in question.text.lower())
                assert question.judge.accepts("Yes.") is (asked in names)
            case "album":
                others = [p.scene for p in question.media if p.scene is not question.scene]
                asked = next(name for name in names if name in question.text.lower())
                assert asked not in [thing.name for scene in others for thing in scene.things]


def test_what_is_missing_is_missing() -> None:
    scene = _scene(_thing("red circle", 20, 20), _thing("blue star", 70, 70))
    missing = Counter(v1.missing_name(rng, scene.things) for rng in [default_rng(0)] for _ in range(300))
    assert not missing.keys() & {"red circle", "blue star"}
    assert missing["red star"] + missing["blue circle"] > 60, "both halves there, but apart"


_TWO = AllThings(("red circle", "blue star"))
_TWINS = AllThings(("red circle", "red circle", "orange star"))

_VERDICTS: list[tuple[Judge, str, bool]] = [
    (
        _TWO,
        "There are two objects: one small red circle and a bright blue five-pointed star, on a white background.",
        True,
    ),
    (_TWO, "The picture shows a red-coloured circle at the top and a blue star.", True),
    (_TWO, "A red circle.", False),
    (_TWO, "a red circle and two blue stars", False),
    (_TWO, "a red circle, a blue star and a square", False),
    (_TWO, "a red circle, a blue star and a pink pentagon", False),
    (_TWINS, "2 red circles, 1 orange star", True),
    (_TWINS, "a red circle and an orange star", False),
    (AllThings(("red circle", "blue circle")), "a red and a blue circle", True),
    (AllThings(("red circle", "blue circle")), "red and blue circles", True),
    (AllThings(("red circle", "blue circle")), "two blue circles", False),
    (Word("colour", "red"), "The circle is red, on a blue background.", True),
    (Word("colour", "red"), "red or orange", False),
    (Word("colour", "red"), "I am tired of circles", False),
    (Word("shape", "circle"), "The red one is circular.", True),
    (Number(3), "Three (2 stars and 1 circle)", True),
    (Number(3), "2 or 3", False),
    (Number(1), "There is a single shape.", True),
    (Number(1), "Someone", False),
    (YesNo(True), "Yes, and there is no blue one.", True),
    (YesNo(True), "yes and no", False),
    (YesNo(True), "yesterday", False),
    (YesNo(False), "No", True),
    (YesNo(False), "It isn't.", True),
    (YesNo(False), "I don't see one.", True),
    (WhichPicture(2, 3), "the second one", True),
    (WhichPicture(2, 3), "The 2nd picture has a red circle.", True),
    (WhichPicture(2, 2), "the last one", True),
    (WhichPicture(2, 3), "the first and the second", False),
    (WhichPicture(1, 3), "picture one", True),
    (OtherThing("red circle", "blue star"), "The red circle is to the left of the blue star.", True),
    (OtherThing("red circle", "blue star"), "Above the star is a red circle.", True),
    (OtherThing("red circle", "blue star"), "The blue star is left of the red circle.", False),
    (Place(("top",), ("left",)), "It is in the upper-left corner of the picture.", True),
    (Place(("top",), ("left",)), "left", False),
    (Place(("top",), ("left",)), "at the top, to the left of the blue star", False),
    (Place(("top",), ("middle",)), "At the top.", True),
    (Place(("middle",), ("left",)), "on the left", True),
    (Place(("middle",), ("middle",)), "In the centre of the picture", True),
    (Place(("middle",), ("middle",)), "middle middle", True),
    (Place(("middle",), ("middle",)), "somewhere", False),
    (Place(("bottom", "middle"), ("right",)), "lower right", True),
]


@pytest.mark.parametrize(("judge", "answer", "verdict"), _VERDICTS)
def test_judges(judge: Judge, answer: str, verdict: bool) -> None:
    assert judge.accepts(answer) is verdict


@pytest.mark.parametrize(
    ("x", "y", "place"),
    [
        (10, 10, Place(("top",), ("left",))),
        (100, 50, Place(("middle",), ("middle",))),
        (190, 90, Place(("bottom",), ("right",))),
        (62, 50, Place(("middle",), ("left", "middle"))),
        (71, 50, Place(("middle",), ("middle", "left"))),
        (72, 36, Place(("middle",), ("middle",))),
        (10, 65, Place(("middle", "bottom"), ("left",))),
    ],
)
def test_places_near_a_line_go_by_either_name(x: float, y: float, place: Place) -> None:
    thing = _thing("red circle", x, y)
    assert Place.of(thing, _scene(thing, width=200, height=100)) == place


def test_the_place_is_that_of_the_bounding_box() -> None:
    triangle = _thing("red triangle", 50, 68, size=60)  # its origin is in the lower third, its box around the middle
    assert Place.of(triangle, _scene(triangle)).rows == ("middle",)


def test_names_mean_one_thing_only() -> None:
    twin, other, star = _thing("red circle", 20, 20), _thing("red circle", 50, 50), _thing("blue star", 80, 80)
    scene = _scene(twin, other, star)
    assert v1.names_of(twin, scene) == []
    assert v1.names_of(star, scene) == ["blue star", "star"]
    assert v1.names_of(twin, _scene(twin, _thing("blue circle", 50, 50))) == ["red circle"]


def test_an_exam_in_this_process() -> None:
    questions = list(make_questions("v2", 20, 3))
    asked: list[list[Message]] = []

    def silent(messages: list[Message]) -> str:
        asked.append(messages)
        return ""

    report = examine(questions, silent)
    assert report.overall.asked == len(report.wrong) == 20
    assert [[message["role"] for message in messages] for messages in asked] == [
        ["user", "assistant", "user"] if question.earlier else ["user"] for question in questions
    ]
    for messages, question in zip(asked, questions, strict=True):
        *pictures, text = messages[0]["content"]
        assert pictures == [picture.part for picture in question.media]
        assert text["text"] == (question.earlier[0][0] if question.earlier else question.text)
        assert not question.earlier or messages[-1]["content"] == question.text


def test_the_report_adds_up() -> None:
    questions = list(make_questions("v1", 12, 4))
    outcomes = [Outcome(question, question.judge.right if n % 2 else "?") for n, question in enumerate(questions)]
    report = Report(tuple(outcomes), seconds=3.0)
    assert report.overall.accuracy == 0.5
    assert report.answers_per_second == 4
    for table in report.tables().values():
        assert sum(tally.asked for tally in table.values()) == 12
        assert sum(tally.right for tally in table.values()) == 6
    plain = json.loads(json.dumps(report.as_dict()))
    assert [wrong["got"] for wrong in plain["wrong"]] == ["?"] * 6
    assert "50.0%" in str(report)
    assert "4.0 answers/s" in str(report)


def test_an_error_ends_the_exam() -> None:
    def failing(messages: list[Message]) -> str:
        raise ConnectionError("no server there")

    with pytest.raises(ConnectionError, match="no server there"):
        examine(make_questions("v1", 2, 0), failing, concurrency=2)


def test_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(ask, "asker", lambda base_url, model: lambda messages: "Yes.")
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
