"""What a free-text answer about a clip says: which way, what changes, when, or that nothing happens."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import groupby
from types import MappingProxyType

from assets.recipe.exam import reading

_WAYS: Mapping[str, str] = MappingProxyType(
    {"left": "left", "right": "right", "up": "up", "upper": "up", "down": "down", "lower": "down"}
)
_EDGES: Mapping[str, str] = MappingProxyType({"top": "up", "bottom": "down"})
_START = re.compile(r"\b(?:from|on|at|near) (?:the )?(?:left|right|top|bottom)(?: (?:side|edge))?\b")  # no way

_NOT = r"(?:not|doesnt|dont|isnt|arent|didnt|never|cannot|cant)"
_MOVES = r"(?:mov(?:es?|ed|ing)|goes|going|slid(?:es?|ing)|drift(?:s|ing)?|travel(?:s|ling|ing)?)"
_CHANGES = r"(?:turn(?:s|ed|ing)?|becom(?:es?|ing)|became|chang(?:es?|ed|ing))"
_EVENT = rf"(?:{_MOVES}|{_CHANGES}|happen(?:s|ed|ing)?)"
_STILL = r"(?:stays?|staying|remains?|still|static|stationary|motionless)"
_LITTLE = (  # words that may stand between a denial and the denied word
    r"(?: (?:is|are|do|does|has|in|on|of|at|all|the|this|to|be|video|clip|scene|objects?|shapes?|things?|them|seems?"
    r"|appears?|see|anything|any|really|ever|much|else|new))*"
)
_DENIAL = re.compile(
    rf"\b(?:nothing|none|neither|{_NOT}|no (?:objects?|shapes?|things?|one)){_LITTLE}"
    rf" {_EVENT}(?: (?:or|and|nor) {_EVENT})*\b"
    r"|\bno (?:movement|motion|changes?)\b"
)
_BARE_DENIAL = re.compile(r"(?:there is )?(?:nothing|none)(?: at all)?(?: (?:here|there|(?:in|of) (?:the|this) \w+))?")
_EXCEPTION = re.compile(rf"\b(?:but|except|besides|only|other than|apart from|{_NOT}(?: \w+)? {_STILL})\b")
_IDLE = re.compile(rf"\b{_STILL}\b|\b{_NOT} {_EVENT}\b")
_CLAUSES = re.compile(r"([.;,\n]|\b(?:and|while|but|whereas)\b)")

_NUMBER = r"(?<![\w.])\d+(?:\.\d+)?"
_TIMES = re.compile(rf"{_NUMBER}(?:\s*(?:-|–|to|and|or)\s*{_NUMBER})*\s*-?\s*s(?:ec(?:ond)?s?)?\b")
_CLOCK = re.compile(r"(?<![\d:])00?:(\d\d(?:\.\d+)?)(?![\d:])")
_NO_TIME = re.compile(r"frame|minute|hour|percent|%|(?<![a-z])(?:ms|milli|min)|(?:^|[\s(])[-−]\d|\bnot\b|n['’]t\b")
_WORD_NUMBER = re.compile(rf"\b(?:{'|'.join(reading.NUMBER_WORDS)})\b")


def ways_in(answer: str) -> set[str]:
    """The ways that the answer names: "to the left", "upwards", "from left to right"; none where it denies any."""
    text = _START.sub("", reading.without_sides_of_things(_active(answer)))
    if re.search(rf"\b{_NOT}\b", text):
        return set()
    words = (re.sub(r"wards?$", "", word) for word in text.split())
    edges = re.findall(r"\b(?:to|towards?) (?:the )?(top|bottom)\b", text)
    return {_WAYS[word] for word in words if word in _WAYS} | {_EDGES[edge] for edge in edges}


def movers_in(answer: str) -> set[str]:
    """The "COLOUR SHAPE"s that are said to move.

    None where the answer denies anything, or has colours and shapes, or more of them, that do not go together.
    """
    text = _active(answer)
    things = reading.things_in(text)
    named = [set(words) for words in zip(*map(str.split, things), strict=True)]
    whole = named == [reading.colours_in(text), reading.shapes_in(text)] and set(things.values()) == {1}
    return set(things) if whole and not re.search(rf"\b{_NOT}\b", reading.plain(text)) else set()


def colours_in_turn(answer: str) -> list[str]:
    """The colours of a change, first to last: two for "turns from red to blue", one for "it turns blue".

    None where the answer denies something.
    """
    text = reading.without_background(_active(answer))
    if re.search(rf"\b{_NOT}\b", text):
        return []
    first = rf"\bfrom (?:an? )?({reading.COLOUR})\b"
    named = re.findall(first, text) + re.findall(rf"\b{reading.COLOUR}\b", re.sub(first, "", text))
    return [colour for colour, _ in groupby(named)]


def changers_in(answer: str) -> set[str]:
    """The shapes that are said to turn or change; none where something is said to move."""
    text = reading.plain(_active(answer))
    tells = re.search(rf"\b{_CHANGES}\b", text) and not re.search(rf"\b{_MOVES}\b", text)
    return reading.shapes_in(text) if tells else set()


def denies_events(answer: str) -> bool:
    """Whether the answer says that nothing happens, or that things stay as they are, and nothing to the contrary."""
    text = reading.plain(answer)
    if _EXCEPTION.search(text):
        return False
    rest = _DENIAL.sub("", text)
    denies = rest != text or re.search(rf"\b{_STILL}\b", text) or _BARE_DENIAL.fullmatch(text)
    return bool(denies) and not re.search(rf"\b{_EVENT}\b", rest)


def seconds_in(answer: str) -> set[float]:
    """The times in seconds that the answer's first statement with any gives: "at 2.5 s", "after three seconds", "2".

    A span ("between two and three seconds") gives both its ends. None for what counts in other units.
    """
    for statement in re.split(r"[;(\n]|\.(?!\d)", _in_digits(answer)):
        spans = (re.findall(_NUMBER, span[0]) for span in _TIMES.finditer(statement))
        times = [time for span in spans for time in span] or _CLOCK.findall(statement)
        times = times or re.findall(rf"{_NUMBER}(?!\w)", statement)
        if times:
            return set() if _NO_TIME.search(statement) else {float(time) for time in times}
    return set()


def _active(answer: str) -> str:
    """The answer without the clauses that say of something that it stays as it is."""
    return "".join(part for part in _CLAUSES.split(answer) if not _IDLE.search(reading.plain(part)))


def _in_digits(answer: str) -> str:
    """The answer in lower case, with number words, halves and decimal commas in digits."""
    text = re.sub(r"(?<=\d),(?=\d)", ".", answer.lower())
    text = _WORD_NUMBER.sub(lambda match: str(reading.NUMBER_WORDS.index(match[0])), text)
    text = re.sub(r"(\d+) point (\d+)", r"\1.\2", text)
    text = re.sub(r"(\d+) and (?:a|1) half\b", r"\1.5", text)
    return re.sub(r"\bhalf an? second\b", "0.5 seconds", text)
