"""The exam's printed texts and boxes: texts lie where they are said to, judges take no wrong text and no wrong box."""

from __future__ import annotations

import json
import math
import string
from collections import Counter

import numpy as np
import pytest
from numpy.random import default_rng

from assets.recipe.exam import texts, v3
from assets.recipe.exam.grounds import LEAST_CONTRAST, LEAST_LUMA_CONTRAST, paint_ground
from assets.recipe.exam.items import Message
from assets.recipe.exam.judges import Judge
from assets.recipe.exam.print_judges import BoxOf, Saying, overlap, saying_in
from assets.recipe.exam.questions import make_questions
from assets.recipe.exam.report import Outcome, Report, examine
from assets.recipe.exam.scenes import Scene, draw
from assets.recipe.exam.signs import make_sign
from assets.recipe.exam.texts import BUILT_IN, Text, faces
from assets.recipe.exam.v1 import names_of
from assets.recipe.exam.v3 import WORDS

_CHARACTERS = ("W", "WWWWWW", "1", "0123", "Jgjpqy", "tea", "Winter", "888888")


def _signs(count: int) -> list[tuple[Scene, Text]]:
    scenes = [make_sign(default_rng([9, seed]), _CHARACTERS[seed % len(_CHARACTERS)]) for seed in range(count)]
    return [(scene, scene.text) for scene in scenes if scene.text]


def test_signs_are_within_the_world() -> None:
    signs = _signs(160)
    assert len(signs) == 160
    for scene, text in signs:
        assert 128 <= scene.short_side <= max(scene.width, scene.height) <= min(1024, 2 * scene.short_side)
        assert 0.12 * scene.short_side <= text.em <= 0.30 * scene.short_side
        left, top, right, bottom = text.box
        assert min(left, top) >= 0.75
        assert right <= scene.width - 0.99
        assert bottom <= scene.height - 0.99
        assert bottom - top < 1.2 * text.em
        for thing in scene.things:
            assert any(text.box[k + 2] < thing.box[k] or thing.box[k + 2] < text.box[k] for k in (0, 1)), "apart"
    assert {len(scene.things) for scene, _ in signs} == {0, 1, 2}
    assert Counter(text.face for _, text in signs).keys() == faces().keys()
    assert {scene.file_format for scene, _ in signs} == {"jpeg", "png"}
    assert {text.left % 1 for _, text in signs} == {0.0, 0.25, 0.5, 0.75}


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


def test_texts_contrast_with_every_pixel_of_the_background() -> None:
    for scene, text in [sign for sign in _signs(60) if sign[0].short_side < 256]:
        ground = paint_ground(scene.ground, scene.width, scene.height)
        assert np.linalg.norm(ground - np.array(text.rgb), axis=2).min() > LEAST_CONTRAST - 0.01
        gaps = (ground - np.array(text.rgb)) @ np.array([0.299, 0.587, 0.114])
        assert np.abs(gaps).min() > LEAST_LUMA_CONTRAST - 0.01


def test_half_a_pixel_to_the_right() -> None:
    pixels = []
    for left in (10.0, 10.5):
        canvas = np.zeros((40, 60, 3), np.float32)
        texts.write(canvas, Text("H", BUILT_IN, 24.0, (255, 255, 255), left, 8.0))
        pixels.append(canvas[..., 0])
    centres = [(each.sum(axis=0) * np.arange(60)).sum() / each.sum() for each in pixels]
    assert centres[1] - centres[0] == pytest.approx(0.5, abs=0.01)
    assert len(np.unique(pixels[1])) > 4, "smooth edges"


def test_without_matplotlib_there_is_a_face(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "find_spec", lambda name: None)
    assert list(faces.__wrapped__()) == [BUILT_IN]


def test_questions_are_fair() -> None:
    questions = list(make_questions("v3", 90, 2))
    assert Counter(question.kind for question in questions) == {"read-word": 30, "read-number": 30, "box": 30}
    assert len({question.text for question in questions}) > 50
    for question in questions:
        assert question.judge.accepts(question.judge.right), question
        assert not question.judge.accepts("")
        assert "{" not in question.text
        if question.kind == "box":
            label = json.loads(question.judge.right)[0]["label"]
            assert label in question.text.lower()
            assert sum(label in names_of(thing, question.scene) for thing in question.scene.things) == 1
            assert "JSON" in question.text or "bbox_2d" in question.text
        else:
            text = question.scene.text
            assert text is not None
            assert text.characters == question.judge.right
            assert 1 <= len(text.characters) <= 6
            assert set(text.characters) <= set(
                string.digits if question.kind == "read-number" else string.ascii_letters
            )
    words = [question.judge.right for question in questions if question.kind == "read-word"]
    cases = Counter("upper" if word.isupper() else "lower" if word.islower() else "capitalised" for word in words)
    assert cases["upper"] > max(cases["lower"], cases["capitalised"])
    assert min(cases["lower"], cases["capitalised"]) > 0


def test_numbers_have_no_leading_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v3, "make_sign", lambda rng, characters: characters)
    monkeypatch.setattr(v3, "take_picture", lambda sign: sign)
    numbers = [v3.read_number(default_rng([7, seed])).judge.right for seed in range(400)]
    assert {len(number) for number in numbers} == set(range(1, 7))
    assert all(number == str(int(number)) for number in numbers)
    assert "0" in numbers


def test_words_are_common_latin_ones() -> None:
    assert len(set(WORDS)) == len(WORDS) > 150
    assert all(1 <= len(word) <= 6 and set(word) <= set(string.ascii_lowercase) for word in WORDS)


_SENTENCES = ("{}", "It says {}.", 'The word is "{}".', "The picture says: **{}**", "{} is written in the picture.")


@pytest.mark.parametrize("sentence", _SENTENCES)
def test_no_word_is_read_as_another(sentence: str) -> None:
    assert [saying_in(sentence.format(word)) for word in WORDS] == list(WORDS)


_TEA, _TEN = Saying("Tea"), Saying("10")

_VERDICTS: list[tuple[Judge, str, bool]] = [
    (_TEA, "Tea", True),
    (_TEA, 'The picture shows the word "TEA".', True),
    (_TEA, "The text reads: tea", True),
    (_TEA, "I can read TEA in the picture.", True),
    (_TEA, "TEA is written in big white letters", False),
    (_TEA, "It says TEA in big white letters.", True),
    (_TEA, "T E A", False),
    (_TEA, "TEA or TEE", False),
    (_TEA, "It does not say tea.", False),
    (_TEA, "tea time", False),
    (_TEA, "téa", False),
    (_TEN, "The number is 10.", True),
    (_TEN, "The number 10 is shown.", True),
    (_TEN, "Number 10", True),
    (_TEN, "ten", False),
    (_TEN, "010", False),
    (_TEN, "10%", False),
    (Saying("O"), "o", True),
    (Saying("O"), "0", False),
]


@pytest.mark.parametrize(("judge", "answer", "verdict"), _VERDICTS)
def test_reading_judges(judge: Judge, answer: str, verdict: bool) -> None:
    assert judge.accepts(answer) is verdict


def _json(*sides: float, key: str = "bbox_2d", label: str = "red circle") -> str:
    return json.dumps([{key: list(sides), "label": label}])


_BOX = BoxOf.of("red circle", (20, 50, 60, 150), 200, 500)  # thousandths: 100, 100, 300, 300


@pytest.mark.parametrize(
    ("answer", "iou"),
    [
        (_BOX.right, 1.0),
        (f"```\n{_json(100.0, 100.0, 300.0, 300.0)}```\n", 1.0),
        (_json(100, 100, 300, 200), 0.5),
        (_json(200, 100, 400, 300), 1 / 3),
        (_json(0, 0, 1000, 1000), 0.04),
        (_json(20, 50, 60, 150), 0.0),
        (_json(100, 100, 300), 0.0),
        (_json(100, 100, 300, 1001), 0.0),
        (_json(100, 100, 1001, 300), 0.0),
        (_json(-1, 100, 300, 300), 0.0),
        (_json(100, 100, 300, 300, key="bbox"), 0.0),
        ('[{"bbox_2d": [100, 100, 300, 300]}]', 0.0),
        ('[{"bbox_2d": ["100", "100", "300", "300"], "label": "a"}]', 0.0),
        (json.dumps(2 * json.loads(_BOX.right)), 0.0),
        (f"Here it is: {_BOX.right}", 0.0),
        ("[]", 0.0),
        ("[100, 100, 300, 300]", 0.0),
        ("[" * 100_000, 0.0),
    ],
)
def test_box_judge(answer: str, iou: float) -> None:
    assert _BOX.measured(answer) == pytest.approx(iou, abs=1e-3)
    assert _BOX.accepts(answer) is (iou >= 0.5)


def test_overlap_is_symmetric_and_of_areas() -> None:
    assert overlap((0, 0, 2, 2), (1, 1, 3, 3)) == overlap((1, 1, 3, 3), (0, 0, 2, 2)) == pytest.approx(1 / 7)
    assert overlap((0, 0, 1, 1), (2, 2, 3, 3)) == 0


def test_the_report_tells_faces_and_overlap() -> None:
    questions = list(make_questions("v3", 12, 4))
    box = [n for n, question in enumerate(questions) if question.kind == "box"]
    outcomes = [Outcome(question, "?" if n == box[0] else question.judge.right) for n, question in enumerate(questions)]
    report = Report(tuple(outcomes), seconds=1.0)
    assert sum(tally.asked for tally in report.tables()["face"].values()) == 8
    assert set(report.tables()["face"]) <= set(faces())
    mean = report.means()["box"]
    assert (mean.measure, mean.count) == ("IoU", 4)
    assert 0.7 < mean.value < 0.76, "three of four right to rounding"
    assert f"box: mean IoU {mean.value:.3f} (4 answers)" in str(report)
    assert json.loads(json.dumps(report.as_dict()))["means"]["box"]["count"] == 4
    assert any(
        'the text "' in each for wrong in examine(questions, _mute).as_dict()["wrong"] for each in wrong["things"]
    )


def _mute(messages: list[Message]) -> str:
    return ""
