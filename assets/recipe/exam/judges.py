"""Judges: each knows the right answer to one question, and tells right answers from wrong ones."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from assets.recipe.exam import reading
from assets.recipe.exam.scenes import Scene, Thing
from assets.recipe.exam.wordings import with_article

THIRD_LINE_MARGIN = 0.025  # of the picture's side


class Judge(Protocol):
    """`right` is a right answer in words; `accepts` tells whether another, in free text, is right as well."""

    @property
    def right(self) -> str: ...

    def accepts(self, answer: str) -> bool: ...


@runtime_checkable
class Measuring(Judge, Protocol):
    """A judge that also tells how good an answer is. `measure` returns the measure, or None if it cannot measure."""

    @property
    def measure(self) -> str: ...

    def measured(self, answer: str) -> float | None: ...


@dataclass(frozen=True)
class AllThings:
    """The things of a scene: each named as often as it is there, and nothing else."""

    names: tuple[str, ...]

    @property
    def right(self) -> str:
        return ", ".join(with_article(name) for name in self.names)

    def accepts(self, answer: str) -> bool:
        shapes = {name.split()[1] for name in self.names}
        return reading.things_in(answer) == Counter(self.names) and reading.shapes_in(answer) <= shapes


@dataclass(frozen=True)
class OtherThing:
    """The one thing beside another. "The red circle is left of the blue star" may repeat where it was asked about."""

    name: str
    beside: str

    @property
    def right(self) -> str:
        return f"the {self.name}"

    def accepts(self, answer: str) -> bool:
        return AllThings((self.name,)).accepts(reading.without_place_beside(answer, self.beside))


@dataclass(frozen=True)
class Word:
    """One colour or one shape, and no other of its kind. Synonyms (violet, disc) are other words."""

    kind: Literal["colour", "shape"]
    right: str

    def accepts(self, answer: str) -> bool:
        named = reading.colours_in(answer) if self.kind == "colour" else reading.shapes_in(answer)
        return named == {self.right}


@dataclass(frozen=True)
class Number:
    """A number of things, in words or numerals."""

    value: int

    @property
    def right(self) -> str:
        return reading.NUMBER_WORDS[self.value]

    def accepts(self, answer: str) -> bool:
        return reading.numbers_in(answer) == {self.value}


@dataclass(frozen=True)
class YesNo:
    """Yes or no."""

    yes: bool

    @property
    def right(self) -> str:
        return "yes" if self.yes else "no"

    def accepts(self, answer: str) -> bool:
        return reading.yes_or_no_in(answer) is self.yes


@dataclass(frozen=True)
class WhichPicture:
    """One of several pictures, `rank` from 1: "picture 2", "the second one", "2"."""

    rank: int
    total: int

    @property
    def right(self) -> str:
        return f"picture {self.rank}"

    def accepts(self, answer: str) -> bool:
        return reading.ranks_in(answer, self.total) == {self.rank}


@dataclass(frozen=True)
class Place:
    """A cell of the picture cut in thirds both ways; the likeliest row and column stand first.

    The cell holds the middle of the thing's bounding box. Within 2.5% of the picture's side from a line between two
    thirds, either side of that line is right: people disagree there too.
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]

    @classmethod
    def of(cls, thing: Thing, scene: Scene) -> Place:
        x, y = thing.centre
        rows = _thirds(y / scene.height, ("top", "middle", "bottom"))
        return cls(rows, _thirds(x / scene.width, ("left", "middle", "right")))

    @property
    def right(self) -> str:
        row, column = self.rows[0], self.columns[0]
        return "middle" if row == column else f"{row} {column}"

    def accepts(self, answer: str) -> bool:
        place = reading.place_in(answer)
        return place is not None and place[0] in self.rows and place[1] in self.columns


def _thirds(share: float, names: tuple[str, str, str]) -> tuple[str, ...]:
    """The third that `share` (0..1) of a side falls in, and the one across a line that is near."""
    exact = names[min(int(share * 3), 2)]
    near = (
        name
        for index, name in enumerate(names)
        if index / 3 - THIRD_LINE_MARGIN <= share <= (index + 1) / 3 + THIRD_LINE_MARGIN
    )
    return exact, *(name for name in near if name != exact)
