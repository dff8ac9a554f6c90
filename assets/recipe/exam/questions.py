"""The exam's questions by level: the kinds take turns, and one seed settles all the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Literal, TypeAlias, get_args

from numpy.random import Generator, default_rng

from assets.recipe.exam import v1, v2, v3, v4
from assets.recipe.exam.items import Question

Level: TypeAlias = Literal["v1", "v2", "v3", "v4", "all"]
Asker: TypeAlias = Callable[[Generator], Question | None]  # None: the scene drawn does not lend itself to the question

LEVELS: tuple[Level, ...] = get_args(Level)
_V1: tuple[Asker, ...] = (v1.describe, v1.colour, v1.shape, v1.where, v1.count, v1.is_there)
_V2: tuple[Asker, ...] = (v2.count_many, v2.relation, v2.beside, v2.album, v2.follow_up)
_V3: tuple[Asker, ...] = (v3.read_word, v3.read_number, v3.box)
_V4: tuple[Asker, ...] = (v4.direction, v4.mover, v4.change, v4.when, v4.clip_yes_no)
_ASKERS: Mapping[Level, tuple[Asker, ...]] = MappingProxyType(
    {"v1": _V1, "v2": _V2, "v3": _V3, "v4": _V4, "all": _V1 + _V2 + _V3 + _V4}
)


def make_question(level: Level, seed: int, number: int) -> Question:
    """Question `number` (from 0) of the exam with this seed; it does not depend on other questions."""
    rng = default_rng([seed, number])
    asker = _ASKERS[level][number % len(_ASKERS[level])]
    while (question := asker(rng)) is None:
        pass
    return question


def make_questions(level: Level, count: int, seed: int) -> Iterator[Question]:
    """The first `count` questions of the exam with this seed."""
    return (make_question(level, seed, number) for number in range(count))
