"""What a free-text answer names: things, colours, shapes, numbers, places. Case and punctuation do not count."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType

from assets.recipe.exam.colours import COLOURS
from assets.recipe.exam.figures import SHAPES

_COUNTED = "zero one two three four five six seven eight nine ten eleven twelve"
NUMBER_WORDS = tuple(_COUNTED.split())
_NUMBERS: Mapping[str, int] = MappingProxyType(
    {word: value for value, word in enumerate(NUMBER_WORDS)} | {"no": 0, "none": 0, "nothing": 0, "single": 1}
)
_ORDINALS: Mapping[str, int] = MappingProxyType({"first": 1, "1st": 1, "second": 2, "2nd": 2, "third": 3, "3rd": 3})
_ROWS: Mapping[str, str] = MappingProxyType({"top": "top", "upper": "top", "bottom": "bottom", "lower": "bottom"})
_COLUMNS: Mapping[str, str] = MappingProxyType({"left": "left", "right": "right"})
_MIDDLES = frozenset({"middle", "mid", "center", "centre", "central", "centered", "centred"})

# Names that no scene has: an answer that gives one is wrong, not empty.
_FOREIGN_COLOURS = "pink brown grey gray cyan magenta teal turquoise violet indigo lime maroon navy gold silver beige"
_FOREIGN_SHAPES = "rectangle oval ellipse pentagon hexagon octagon diamond rhombus heart cross cube sphere ball dot"
_SPELLINGS: Mapping[str, str] = MappingProxyType({"circular": "circle", "triangular": "triangle"})

COLOUR = rf"(?:{'|'.join((*COLOURS, *_FOREIGN_COLOURS.split()))})"
_SHAPE = rf"(?:{'|'.join((*SHAPES, *_FOREIGN_SHAPES.split()))})"
_NUMBER = rf"(?:{'|'.join(_NUMBERS)}|\d+)"
_DETAIL = (
    r"(?:small|smaller|tiny|little|large|larger|big|bigger|huge|medium|sized|solid|filled|plain|simple|bright|dark|light"
    r"|deep|pale|vivid|colou?red|slightly|tilted|rotated|turned)"
)
_PAIRS = re.compile(
    rf"\b(?:({_NUMBER}) )?(?:{_DETAIL} )*"
    rf"({COLOUR}(?: (?:and )?(?:(?:an?|one) )?(?:{_DETAIL} )*{COLOUR})*)"
    rf"(?: {_DETAIL})* ({_SHAPE})s?\b"
)
_BACKGROUND = re.compile(
    rf"\b(?:on|against|over|with|in front of) (?:(?!{_SHAPE})\w+ ){{0,5}}?background\b"
    rf"|\bbackground is (?:a )?(?:{_DETAIL} )*{COLOUR}\b"
)
_STAR_POINTS = re.compile(r"\b(?:five|5) point(?:ed)? ")


def plain(answer: str) -> str:
    """The answer in lower case, its words apart by single spaces, with nothing else left."""
    text = re.sub(r"['’]", "", answer.lower())
    return re.sub(r"[^a-z0-9]+", " ", text).strip()


def things_in(answer: str) -> Counter[str]:
    """How many of each "COLOUR SHAPE" the answer names: "two red circles", "a red and a blue star".

    A shape named without a colour is no thing. Words about the background name no thing either.
    """
    found: Counter[str] = Counter()
    listed = re.sub(r"(?m)^\s*\d+[.)]\s", "", answer)  # "1. A red circle": a place in a list, no amount
    for number, colours, shape in _PAIRS.findall(without_background(listed)):
        named = re.findall(rf"\b{COLOUR}\b", colours)
        for colour in named:
            found[f"{colour} {shape}"] += _value(number) if number and len(named) == 1 else 1
    return +found


def colours_in(answer: str) -> set[str]:
    """The colours that the answer names, without the background's."""
    return set(re.findall(rf"\b{COLOUR}\b", without_background(answer)))


def shapes_in(answer: str) -> set[str]:
    """The shapes that the answer names, in one number or the other, or as "circular"."""
    words = (_SPELLINGS.get(word, word) for word in plain(answer).split())
    return {word.removesuffix("s") for word in words if re.fullmatch(rf"{_SHAPE}s?", word)}


def numbers_in(answer: str) -> set[int]:
    """The numbers in the answer's first statement: what follows a colon, a full stop or a bracket only explains it."""
    for statement in re.split(r"[:;(\n]|\.(?!\d)", answer):
        found = {_value(word) for word in re.findall(rf"\b{_NUMBER}\b", plain(statement))}
        if found:
            return found
    return set()


def place_in(answer: str) -> tuple[str, str] | None:
    """The row and column of a place such as "top left", "the centre" or "left"; None for none or for two at once.

    Whatever axis goes unnamed is the middle one: "left" is "middle left". A side of another thing is no place.
    """
    words = without_sides_of_things(answer).split()
    rows = {_ROWS[word] for word in words if word in _ROWS}
    columns = {_COLUMNS[word] for word in words if word in _COLUMNS}
    if len(rows) > 1 or len(columns) > 1 or not (rows or columns or _MIDDLES.intersection(words)):
        return None
    return (rows or {"middle"}).pop(), (columns or {"middle"}).pop()


def yes_or_no_in(answer: str) -> bool | None:
    """Yes, no, or None where the answer is neither or both."""
    words = plain(answer).split()
    said = {"yes": True, "yeah": True, "yep": True, "no": False, "nope": False}
    if re.match(r"(yes|no) (and|or) (yes|no)\b", " ".join(words)):
        return None
    if words and words[0] in said:
        return said[words[0]]
    verdicts = {said[word] for word in words if word in said}
    if re.search(r"\b(?:(?:is|are|does) not|do not see|isnt|arent|doesnt|dont see)\b", " ".join(words)):
        verdicts.add(False)
    return verdicts.pop() if len(verdicts) == 1 else None


def ranks_in(answer: str, total: int) -> set[int]:
    """The numbers, from 1, of those of `total` pictures that the answer names: "picture 2", "the second one", "the
    last"."""
    text = plain(answer)
    words = re.sub(r"(?<!picture)(?<!image)(?<!photo)(?<!number) one\b", "", text).split()  # "the second one"
    ranks = {_ORDINALS[word] for word in words if word in _ORDINALS} | ({total} if "last" in words else set())
    return ranks | {_value(word) for word in words if re.fullmatch(_NUMBER, word)}


def without_place_beside(answer: str, name: str) -> str:
    """The answer without "left of the NAME", "above the NAME" and the like, NAME with its colour or without."""
    colour, shape = name.split()
    beside = rf"\b(?:of|above|below|over|under|beneath|underneath) (?:the |an? )?(?:{colour} )?{shape}\b"
    return re.sub(beside, "", plain(answer))


def without_sides_of_things(answer: str) -> str:
    """The plain answer without "left of the red circle", "top of a star" and the like."""
    return re.sub(rf"\b(?:left|right|top|bottom) of (?:the |an? )?(?:{COLOUR} )?{_SHAPE}\b", "", plain(answer))


def without_background(answer: str) -> str:
    """The plain answer without its words about the background and about the number of a star's points."""
    return _STAR_POINTS.sub("", _BACKGROUND.sub("", plain(answer)))


def _value(number: str) -> int:
    return int(number) if number.isdecimal() else _NUMBERS[number]
