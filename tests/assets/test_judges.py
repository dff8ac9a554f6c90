"""The exam's judges tell right answers from wrong ones."""

from __future__ import annotations

import json

import pytest

from assets.recipe.exam.clip_judges import Direction, Instant, LaterColour, Mover, Nothing, Turning
from assets.recipe.exam.clip_reading import seconds_in
from assets.recipe.exam.judges import AllThings, Judge, Number, OtherThing, Place, WhichPicture, Word, YesNo
from assets.recipe.exam.print_judges import BoxOf, Saying, saying_in
from assets.recipe.exam.v3 import WORDS
from tests.assets.test_exam import make_scene_of, make_thing

_TWO = AllThings(("red circle", "blue star"))
_TWINS = AllThings(("red circle", "red circle", "orange star"))
_LEFT, _UP = Direction("left"), Direction("up")
_CIRCLE, _NOTHING = Mover("red circle"), Nothing()
_BLUE, _SQUARE = LaterColour("red", "blue"), Turning("square", "red", "blue")
_TWO_AND_A_HALF = Instant(2.5)
_TEA, _TEN = Saying("Tea"), Saying("10")

_VERDICTS: list[tuple[Judge, str, bool]] = [
    (
        _TWO,
        "There are two objects: one small red circle and a bright blue five-pointed star, on a white background.",
        True,
    ),
    (_TWO, "A red circle.", False),
    (_TWO, "a red circle and two blue stars", False),
    (_TWO, "a red circle, a blue star and a square", False),
    (_TWO, "a red circle, a blue star and a pink pentagon", False),
    (_TWINS, "2 red circles, 1 orange star", True),
    (_TWINS, "a red circle and an orange star", False),
    (AllThings(("red circle", "blue circle")), "a red and a blue circle", True),
    (Word("colour", "red"), "The circle is red, on a blue background.", True),
    (Word("colour", "red"), "I am tired of circles", False),
    (Word("shape", "circle"), "The red one is circular.", True),
    (Number(3), "Three (2 stars and 1 circle)", True),
    (Number(3), "2 or 3", False),
    (Number(1), "There is a single shape.", True),
    (YesNo(True), "Yes, and there is no blue one.", True),
    (YesNo(True), "yes and no", False),
    (YesNo(False), "It isn't.", True),
    (YesNo(False), "I don't see one.", True),
    (WhichPicture(2, 3), "the second one", True),
    (WhichPicture(2, 2), "the last one", True),
    (WhichPicture(2, 3), "the first and the second", False),
    (WhichPicture(1, 3), "picture one", True),
    (OtherThing("red circle", "blue star"), "The red circle is to the left of the blue star.", True),
    (OtherThing("red circle", "blue star"), "Above the star is a red circle.", True),
    (OtherThing("red circle", "blue star"), "The blue star is left of the red circle.", False),
    (Place(("top",), ("left",)), "It is in the upper-left corner of the picture.", True),
    (Place(("top",), ("left",)), "left", False),
    (Place(("top",), ("left",)), "at the top, to the left of the blue star", False),
    (Place(("middle",), ("middle",)), "middle middle", True),
    (Place(("middle",), ("middle",)), "somewhere", False),
    (Place(("bottom", "middle"), ("right",)), "lower right", True),
    (_LEFT, "from right to left", True),
    (_LEFT, "left or right", False),
    (_LEFT, "to the upper left", False),
    (_LEFT, "It is on the left.", False),
    (_UP, "Upwards", True),
    (_UP, "from top to bottom", False),
    (_CIRCLE, "The red circle moves, and the blue star stays where it is.", True),
    (_CIRCLE, "The blue star does not move; the red circle does.", True),
    (_CIRCLE, "The red circle and the blue star.", False),
    (_CIRCLE, "Two red circles", False),
    (_CIRCLE, "The red circle and a star", False),
    (_CIRCLE, "Not the red circle.", False),
    (_NOTHING, "nothing", True),
    (_NOTHING, "Nothing in this video moves.", True),
    (_NOTHING, "Nothing moves or changes.", True),
    (_NOTHING, "It doesn't seem to move.", True),
    (_NOTHING, "There is no movement.", True),
    (_NOTHING, "The red circle.", False),
    (_NOTHING, "Nothing moves, then the square turns blue.", False),
    (_NOTHING, "The circle is not still.", False),
    (_BLUE, "Blue.", True),
    (_SQUARE, "A square changes its colour from red to blue.", True),
    (_SQUARE, "The square becomes blue while the green star stays still.", True),
    (_SQUARE, "The blue square turns red.", False),
    (_SQUARE, "The red square moves and turns blue.", False),
    (_SQUARE, "The red square and the star turn blue.", False),
    (_TWO_AND_A_HALF, "At 2s", True),
    (_TWO_AND_A_HALF, "two and a half seconds", True),
    (_TWO_AND_A_HALF, "at 0:02", True),
    (_TWO_AND_A_HALF, "After about 2,5 seconds. The clip is 5 seconds long.", True),
    (_TWO_AND_A_HALF, "At 1 or 2 seconds", False),
    (_TWO_AND_A_HALF, "-2 seconds", False),
    (_TWO_AND_A_HALF, "five point two seconds", False),
    (_TEA, "Tea", True),
    (_TEA, 'The picture shows the word "TEA".', True),
    (_TEA, "TEA is written in big white letters", False),
    (_TEA, "It says TEA in big white letters.", True),
    (_TEA, "T E A", False),
    (_TEA, "TEA or TEE", False),
    (_TEA, "It does not say tea.", False),
    (_TEA, "tea time", False),
    (_TEA, "téa", False),
    (_TEN, "The number is 10.", True),
    (_TEN, "ten", False),
    (_TEN, "10%", False),
    (Saying("O"), "o", True),
    (Saying("O"), "0", False),
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
    thing = make_thing("red circle", x, y)
    assert Place.of(thing, make_scene_of(thing, width=200, height=100)) == place


def test_the_place_is_that_of_the_bounding_box() -> None:
    triangle = make_thing(
        "red triangle", 50, 68, size=60
    )  # its origin is in the lower third, its box around the middle
    assert Place.of(triangle, make_scene_of(triangle)).rows == ("middle",)


def test_number_words_are_read_as_seconds() -> None:
    words = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
    assert [seconds_in(f"After {word} seconds.") for word in words] == [{float(value)} for value in range(13)]


@pytest.mark.parametrize("sentence", ["{}", "It says {}.", "The picture says: **{}**", "{} is written in the picture."])
def test_no_word_is_read_as_another(sentence: str) -> None:
    assert [saying_in(sentence.format(word)) for word in WORDS] == list(WORDS)


def _json(*sides: float, key: str = "bbox_2d", label: str = "red circle") -> str:
    return json.dumps([{key: list(sides), "label": label}])


_BOX = BoxOf.of("red circle", (20, 50, 60, 150), 200, 500)  # thousandths: 100, 100, 300, 300


@pytest.mark.parametrize(
    ("answer", "iou"),
    [
        (_BOX.right, 1.0),
        (f"```\n{_json(100.0, 100.0, 300.0, 300.0)}```\n", 1.0),
        (_json(100, 100, 300, 200), 0.5),
        (_json(20, 50, 60, 150), 0.0),
        (_json(100, 100, 300), 0.0),
        (_json(100, 100, 300, 1001), 0.0),
        (_json(100, 100, 300, 300, key="bbox"), 0.0),
        ('[{"bbox_2d": [100, 100, 300, 300]}]', 0.0),
        (json.dumps(2 * json.loads(_BOX.right)), 0.0),
        (f"Here it is: {_BOX.right}", 0.0),
        ("[]", 0.0),
        ("[" * 100_000, 0.0),
    ],
)
def test_box_judge(answer: str, iou: float) -> None:
    assert _BOX.measured(answer) == pytest.approx(iou, abs=1e-3)
    assert _BOX.accepts(answer) is (iou >= 0.5)
