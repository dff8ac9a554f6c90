"""Judges of printed texts and of bounding boxes."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from assets.recipe.exam.figures import Box

LEAST_OVERLAP = 0.5  # intersection over union
_NOUN = r"(?:word|text|number|numeral|figure|digits?|letters?|characters?|sign|writing|inscription)"
_MEDIUM = r"(?:picture|image|photo)"
_LEAD = (
    rf"(?:(?:(?:it|this|that|here|there|(?:the|this) (?:{_NOUN}|{_MEDIUM}))(?: (?:in|on) (?:the|this) {_MEDIUM})?"
    rf" (?:says?|reads?|is|are|shows?|displays?|spells?|contains?)(?: written| shown)?|i (?:can )?(?:see|read))"
    rf"(?: (?:the|a) {_NOUN})?|(?:the )?{_NOUN})"
)
_TAIL = (
    rf"(?:(?:is )?(?:written|printed|shown)(?: (?:here|there|(?:in|on) (?:the|this) {_MEDIUM}))?"
    rf"|(?:in|on) (?:the|this) {_MEDIUM}|in (?:\w+ ){{0,3}}(?:letters|capitals|digits|text))"
)
_SAYING = re.compile(rf"(?:{_LEAD} )?(\S+)(?: {_TAIL})?")
_OPENING = "\"'`*“”‘’«([{"
_CLOSING = "\"'`*“”‘’»)]}.,:;!?"
_FENCE = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.DOTALL)


def saying_in(answer: str) -> str | None:
    """The one text that an answer gives, in lower case: 'tea' for 'It says "TEA".'; None where it is not just one.

    Only words from a short list may stand around it, and only quotes, brackets, asterisks and the marks that end a
    sentence may touch it: "-5", "T.E.A." and "tea or tee" are none of 5 and tea.
    """
    words = (word.lstrip(_OPENING).rstrip(_CLOSING) for word in answer.lower().split())
    match = _SAYING.fullmatch(" ".join(word for word in words if word))
    return match[1] if match else None


def boxes_in(answer: str) -> list[Box]:
    """The boxes of an answer in Qwen3-VL's JSON, in a fence or not: `[{"bbox_2d": [x1, y1, x2, y2], "label": "..."}]`.

    Coordinates are thousandths of the picture's width and height. None at all where anything is amiss.
    """
    fenced = _FENCE.fullmatch(answer.strip())
    try:
        found = json.loads(fenced[1] if fenced else answer)
    except (ValueError, RecursionError):
        return []
    return [tuple(each["bbox_2d"]) for each in found] if isinstance(found, list) and all(map(_is_box, found)) else []


def overlap(one: Box, two: Box) -> float:
    """Intersection over union, 0..1."""
    shared = _area((max(one[0], two[0]), max(one[1], two[1]), min(one[2], two[2]), min(one[3], two[3])))
    return shared / (_area(one) + _area(two) - shared)


@dataclass(frozen=True)
class Saying:
    """A printed text: the very characters, in upper case or lower, and no other characters."""

    right: str

    def accepts(self, answer: str) -> bool:
        return saying_in(answer) == self.right.lower()


@dataclass(frozen=True)
class BoxOf:
    """The place of the thing called `label`: just one box, which overlaps the true one (in thousandths) by half or
    more."""

    label: str
    box: Box

    measure = "IoU"

    @classmethod
    def of(cls, label: str, box: Box, width: int, height: int) -> BoxOf:
        """`box` in pixels of a picture of that size."""
        left, top, right, bottom = box
        return cls(label, (1000 * left / width, 1000 * top / height, 1000 * right / width, 1000 * bottom / height))

    @property
    def right(self) -> str:
        return json.dumps([{"bbox_2d": [round(side) for side in self.box], "label": self.label}])

    def accepts(self, answer: str) -> bool:
        return self.measured(answer) >= LEAST_OVERLAP

    def measured(self, answer: str) -> float:
        """Intersection over union; 0 where the answer is not just one box."""
        boxes = boxes_in(answer)
        return overlap(boxes[0], self.box) if len(boxes) == 1 else 0.0


def _is_box(value: object) -> bool:
    if not (isinstance(value, dict) and isinstance(value.get("label"), str)):
        return False
    sides = value.get("bbox_2d")
    if not (isinstance(sides, list) and len(sides) == 4 and all(type(side) in (int, float) for side in sides)):
        return False
    return 0 <= sides[0] < sides[2] <= 1000 and 0 <= sides[1] < sides[3] <= 1000


def _area(box: Box) -> float:
    return max(box[2] - box[0], 0) * max(box[3] - box[1], 0)
