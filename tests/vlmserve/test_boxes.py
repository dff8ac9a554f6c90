"""Boxes in answers: every form, every way to break off, and the way back to the picture that was sent."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlmserve.commands.client.boxes import Box, Marks, Point, parse_boxes

DOG = {"bbox_2d": [10, 20.5, 30, 40], "label": "dog"}
CAT = {"bbox_2d": [1, 2, 3, 4], "label": "cat [1] {x}"}
EYE = {"point_2d": [7, 8], "label": "eye"}
DOG_BOX = Box(x1=10, y1=20.5, x2=30, y2=40, label="dog")
CAT_BOX = Box(x1=1, y1=2, x2=3, y2=4, label="cat [1] {x}")


@pytest.mark.parametrize(
    "text",
    [
        json.dumps([DOG, CAT, EYE]),
        json.dumps([DOG, CAT, EYE], indent=2),
        f"```json\n{json.dumps([DOG, CAT, EYE], indent=4)}\n```",
        f"Here [you] are:\n```json\n{json.dumps([DOG, CAT])}\n```\nand {json.dumps(EYE)}. Done.",
        json.dumps({"objects": [DOG, {"inner": CAT}], "points": EYE}),
        "\n".join(map(json.dumps, (DOG, CAT, EYE))),
    ],
)
def test_json(text):
    assert parse_boxes(text) == Marks(boxes=(DOG_BOX, CAT_BOX), points=(Point(x=7, y=8, label="eye"),))


def test_json_in_other_wordings():
    two = {"bbox_2d": [[1, 2, 3, 4], [5, 6, 7, 8]], "text_content": "ab"}
    assert [box.x1 for box in parse_boxes(json.dumps(two)).boxes] == [1, 5]
    assert parse_boxes(json.dumps(two)).boxes[0].label == "ab"
    bare = parse_boxes('{"bbox_2d": [1, 2, 3, 4], "label": 5}')
    assert bare.boxes == (Box(x1=1, y1=2, x2=3, y2=4),)
    assert not bare.problems
    assert parse_boxes('[{"bbox_2d": []}]') == Marks()


def test_qwen2_vls_tokens():
    text = (
        "<|object_ref_start|>the dog<|object_ref_end|><|box_start|>(221,423),(569,886)<|box_end|>"
        "<|box_start|>(1,2),(3.5,4)<|box_end|> and <|box_start|>(5,6),(7,8)<|box_end|> <|box_start|>(9, 10)<|box_end|>"
    )
    assert parse_boxes(text) == Marks(
        boxes=(
            Box(x1=221, y1=423, x2=569, y2=886, label="the dog"),
            Box(x1=1, y1=2, x2=3.5, y2=4, label="the dog"),
            Box(x1=5, y1=6, x2=7, y2=8),
        ),
        points=(Point(x=9, y=10),),
    )


def test_qwen2_vls_form_without_tokens():
    assert parse_boxes("the dog(221,423),(569,886) and a cat (1, 2), (3, 4).") == Marks(
        boxes=(Box(x1=221, y1=423, x2=569, y2=886), Box(x1=1, y1=2, x2=3, y2=4))
    )
    assert parse_boxes("(221,423),(569,88").problems
    assert parse_boxes("the dog(221,423),(").problems
    assert parse_boxes("the dog(221,4").problems


@pytest.mark.parametrize(
    "text", ["", None, "A red circle.", "At (3, 4), I think (maybe).", "[1, 2] {x}", "sizes: {'a': 1}"]
)
def test_no_boxes(text):
    assert parse_boxes(text) == Marks()


@pytest.mark.parametrize("fence", [False, True])
@pytest.mark.parametrize("indent", [None, 2])
def test_wherever_json_breaks_off(fence, indent):
    whole = json.dumps([DOG, CAT, EYE], indent=indent)
    whole = f"```json\n{whole}\n```" if fence else whole
    ends = [whole.index("}") + 1, whole.index("}", whole.index("{x}") + 3) + 1, whole.rindex("}") + 1]
    for cut in range(whole.index("bbox_2d") + 7, len(whole)):
        marks = parse_boxes(whole[:cut])
        found = len(marks.boxes) + len(marks.points)
        assert found == sum(end <= cut for end in ends), whole[:cut]
        assert marks.boxes == (DOG_BOX, CAT_BOX)[: len(marks.boxes)]
        assert marks.problems, whole[:cut]
    assert not parse_boxes(whole).problems


def test_wherever_tokens_break_off():
    start, end = "<|box_start|>", "<|box_end|>"
    whole = f"{start}(221,423),(569,886){end}{start}(1,2),(3,4){end}"
    first = whole.index(end) + len(end)
    for cut in (*range(len(start), first - len(end)), *range(first + len(start), len(whole) - len(end))):  # tokens stay
        marks = parse_boxes(whole[:cut])
        assert len(marks.boxes) == (cut >= first)
        assert marks.problems, whole[:cut]
    assert len(parse_boxes(whole[:first]).boxes) == 1


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ('{"bbox_2d": [1, 2, 3], "label": "x"}', "not 4 numbers"),
        ('{"bbox_2d": [1, 2, 3, true]}', "not 4 numbers"),
        ('{"bbox_2d": [1, 2, 3, 1e999]}', "not 4 numbers"),
        ('{"bbox_2d": [[1, 2, 3, 4], 5]}', "not 4 numbers"),
        ('{"point_2d": [1]}', "not 2 numbers"),
        ('{"bbox_2d": [1, 2, 3, NaN]}', "cut off or not valid JSON"),
        ('{"bbox_2d": [1, 2, 3, ' + "9" * 6000 + "]}", "cut off or not valid JSON"),
        ("{'bbox_2d': [1, 2, 3, 4]}", "cut off or not valid JSON"),
    ],
)
def test_a_bad_one_among_good_ones_is_named(bad, said):
    marks = parse_boxes(f"[{json.dumps(DOG)}, {bad}, {json.dumps(CAT)}]")
    assert marks.boxes == (DOG_BOX, CAT_BOX)
    (problem,) = marks.problems
    assert said in problem


PIECES = ['{"bbox_2d": ', "[1, 2, 3, 4]", '"label"', ": ", "[", "]", "{", "}", ",", '"', "1e999", "```", "(1,2)", "dog"]
PIECES += ["<|box_start|>", "<|box_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "\\", "NaN", "null", "\ud800"]


@given(st.lists(st.sampled_from(PIECES), max_size=30).map("".join) | st.text(max_size=60))
def test_nothing_raises(text):
    marks = parse_boxes(text)
    for box in marks.boxes:
        assert all(abs(side) < 1e9 for side in (box.x1, box.y1, box.x2, box.y2))


REPEATED = ["[", "{", "(1,2),(", "<|box_start|>", "<|object_ref_start|>", '"bbox_2d"', '{"bbox_2d": ', '[{"bbox_2d": [']
REPEATED += ['{"a": ' * 12 + "1" + "}" * 11, '{"a": "', "{}", '{"bbox_2d": [1, 2, 3, 4]}, ']


@pytest.mark.timeout(60)
@pytest.mark.parametrize("piece", REPEATED)
def test_the_work_on_endless_repetition_grows_with_its_length(piece):
    """A lost model repeats itself. Work that grows with the square of the length would take minutes here."""
    text = piece * (100_000 // len(piece))
    parse_boxes('"bbox_2d" [' + text)
    parse_boxes(text)


SOURCE = {"source_size": {"width": 640, "height": 480}, "scale": {"x": 2.0, "y": 1.5}}


def test_back_to_the_source():
    marks = Marks(
        boxes=(Box(x1=10, y1=20, x2=100, y2=200, label="dog"),), points=(Point(x=500, y=1000),), problems=("x",)
    )
    absolute = marks.to_source({"coordinates": "absolute", **SOURCE})
    assert absolute.boxes == (Box(x1=20, y1=30, x2=200, y2=300, label="dog"),)
    assert absolute.points == (Point(x=1000, y=1500),)
    relative = marks.to_source({"coordinates": "0-1000", **SOURCE})
    assert relative.boxes == (Box(x1=6.4, y1=9.6, x2=64, y2=96, label="dog"),)
    assert relative.points == (Point(x=320, y=480),)
    assert absolute.problems == relative.problems == ("x",)
    with pytest.raises(ValueError, match="coordinates 'polar' are not known"):
        marks.to_source({"coordinates": "polar", **SOURCE})
    without = ({}, {"coordinates": "absolute"}, {"coordinates": "0-1000", "source_size": {}}, [], None)
    for entry in (*without, {"coordinates": "absolute", "scale": 2}):
        with pytest.raises(ValueError, match="this is no picture's entry of an mm_report"):
            marks.to_source(entry)


def test_it_needs_nothing_but_the_standard_library():
    heavy = ("torch", "numpy", "PIL", "msgspec")
    code = f"import sys, vlmserve.commands.client.boxes; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout == "[]\n"
