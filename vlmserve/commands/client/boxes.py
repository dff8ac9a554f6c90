"""Boxes and points in a model's answer, and where they are in the picture that was sent.

    answer = client.chat.completions.create(..., extra_body={"return_mm_report": True})
    marks = parse_boxes(answer.choices[0].message.content)
    for box in marks.to_source(answer.mm_report["media"][0]).boxes:
        draw.rectangle((box.x1, box.y1, box.x2, box.y2))

The module needs the standard library only. No text of a model raises an error: complete boxes and points are returned,
and `problems` names the others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

_LABELS = ("label", "text_content")
_CLAIM = re.compile(r"""["'](?:bbox_2d|point_2d)\b""")
_OBJECT = re.compile(r"""\{(?=\s*["}])""")
_STEP = re.compile(r"""[^{}\[\]"]*+(?:([{\[])|([}\]])|"(?:[^"\\]++|\\.)*+")""", re.DOTALL)
_DEEPEST = 16  # an answer has two or three levels; the work grows with them
_MARKED = re.compile(
    r"<\|object_ref_start\|>(?P<label>[^<]*)<\|object_ref_end\|>|<\|box_start\|>(?P<box>[^<]*)(?P<end><\|box_end\|>)?"
)
_NUMBER = r"-?[0-9]{1,9}(?:\.[0-9]{1,9})?"
_PAIR = re.compile(rf"\(\s*({_NUMBER})\s*,\s*({_NUMBER})\s*\)")
_CORNERS = re.compile(rf"{_PAIR.pattern}\s*,\s*{_PAIR.pattern}")
_CUT_CORNERS = re.compile(rf"(?:{_PAIR.pattern}\s*,\s*)?\([-0-9.,\s]*\Z")


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """A box by two opposite corners: in the model's coordinates or, after `to_source`, in pixels of the picture."""

    x1: float
    y1: float
    x2: float
    y2: float
    label: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One place, in the coordinates that a `Box` has."""

    x: float
    y: float
    label: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Marks:
    """The boxes and points of an answer, in the order of its text.

    problems: a sentence for each one that is incomplete. An answer that was cut off has at least one.
    """

    boxes: tuple[Box, ...] = ()
    points: tuple[Point, ...] = ()
    problems: tuple[str, ...] = ()

    def to_source(self, medium: Mapping[str, Any]) -> Marks:
        """Return the marks in pixels of the upright source. medium: the picture's entry in the answer's `mm_report`.

        Raises ValueError for an entry that does not name its coordinates.
        """
        x, y = _factors(medium)
        boxes = (replace(box, x1=box.x1 * x, y1=box.y1 * y, x2=box.x2 * x, y2=box.y2 * y) for box in self.boxes)
        points = (replace(point, x=point.x * x, y=point.y * y) for point in self.points)
        return replace(self, boxes=tuple(boxes), points=tuple(points))


def parse_boxes(text: str | None) -> Marks:
    """Find the boxes and points in an answer, in the model's own coordinates.

    Forms: Qwen2.5-VL's and Qwen3-VL's JSON objects with bbox_2d or point_2d, fenced or not. Qwen2-VL's
    <|box_start|>(x1,y1),(x2,y2)<|box_end|>, also without its special tokens, which answers leave out by default.
    """
    text = text or ""
    if _CLAIM.search(text):
        return _from_json(text)
    if "<|box_start|>" in text:
        return _from_tokens(text)
    found = tuple(_box(match.groups()) for match in _CORNERS.finditer(text))
    problems = ["a box at the end of the text is cut off"] if _CUT_CORNERS.search(text) else []
    return Marks(boxes=found, problems=(*problems, *_fence_problems(text)))


def _from_json(text: str) -> Marks:
    boxes: list[Box] = []
    points: list[Point] = []
    problems: list[str] = []
    depth, read = 0, 0  # lists that are open, and characters accounted for

    def pass_over(end: int) -> None:
        """Look through the text between objects that were read."""
        nonlocal depth
        claims = _CLAIM.finditer(text, read, end)
        problems.extend(f"the {c.group()[1:]} at character {c.start()} is cut off or not valid JSON" for c in claims)
        depth += text.count("[", read, end) - text.count("]", read, end)

    for match in _OBJECT.finditer(text):
        if match.start() < read:  # within an object that was read
            continue
        end = _end_of_object(text, match.start())
        try:
            value = json.loads(text[match.start() : end], parse_constant=_no_number)
        except ValueError:
            continue
        pass_over(match.start())
        read = end
        for entry in _objects(value):
            label = next((entry[name] for name in _LABELS if isinstance(entry.get(name), str)), None)
            for key, count in (("bbox_2d", 4), ("point_2d", 2)):
                rows = _rows(entry.get(key, []), count)
                if rows is None:
                    problems.append(f"the {key} before character {end} is not {count} numbers")
                elif count == 4:
                    boxes += [_box(row, label) for row in rows]
                else:
                    points += [Point(x=row[0], y=row[1], label=label) for row in rows]
    pass_over(len(text))
    if depth > 0 and not problems:
        problems.append("the list of boxes does not end: the text may be cut off")
    return Marks(boxes=tuple(boxes), points=tuple(points), problems=(*problems, *_fence_problems(text)))


def _from_tokens(text: str) -> Marks:
    boxes: list[Box] = []
    points: list[Point] = []
    problems: list[str] = []
    label, label_end = None, -1
    for match in _MARKED.finditer(text):
        if match["label"] is not None:
            label, label_end = match["label"].strip(), match.end()
            continue
        if text[label_end : match.start()].strip():  # the label belonged to another object
            label = None
        label_end = match.end()
        rows = [tuple(map(float, pair)) for pair in _PAIR.findall(match["box"])]
        if match["end"] is None or len(rows) not in (1, 2):
            problems.append(f"the box at character {match.start()} is cut off or not one or two pairs of numbers")
        elif len(rows) == 2:
            boxes.append(_box(rows[0] + rows[1], label))
        else:
            points.append(Point(x=rows[0][0], y=rows[0][1], label=label))
    return Marks(boxes=tuple(boxes), points=tuple(points), problems=tuple(problems))


def _end_of_object(text: str, start: int) -> int:
    """Return where the object ends that starts there; `start` if it does not end."""
    depth, place = 0, start
    while depth <= _DEEPEST and (step := _STEP.match(text, place)):
        depth += (step[1] is not None) - (step[2] is not None)
        place = step.end()
        if depth == 0:
            return place
    return start


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all JSON objects in a value, itself included, in the order of the text."""
    todo = [value]
    while todo:
        value = todo.pop()
        if isinstance(value, dict):
            yield value
            todo += reversed(value.values())
        elif isinstance(value, list):
            todo += reversed(value)


def _rows(value: Any, count: int) -> list[tuple[float, ...]] | None:
    """Read `count` numbers, or a list of such rows; None for anything else."""
    if not isinstance(value, list):
        return None
    rows = value if all(isinstance(row, list) for row in value) else [value]
    good = all(len(row) == count and all(_is_number(number) for number in row) for row in rows)
    return [tuple(map(float, row)) for row in rows] if good else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 10**9


def _box(row: Sequence[Any], label: str | None = None) -> Box:
    return Box(x1=float(row[0]), y1=float(row[1]), x2=float(row[2]), y2=float(row[3]), label=label)


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no JSON")


def _fence_problems(text: str) -> list[str]:
    return ["a fenced block does not end: the text may be cut off"] if text.count("```") % 2 else []


def _factors(medium: Mapping[str, Any]) -> tuple[float, float]:
    """Return the factors from the model's x and y to pixels of the source."""
    try:
        if medium["coordinates"] == "absolute":
            return medium["scale"]["x"], medium["scale"]["y"]
        if medium["coordinates"] == "0-1000":
            return medium["source_size"]["width"] / 1000, medium["source_size"]["height"] / 1000
    except (KeyError, TypeError) as error:
        raise ValueError(f"this is no picture's entry of an mm_report: {error!r}") from error
    raise ValueError(f"coordinates {medium['coordinates']!r} are not known")
