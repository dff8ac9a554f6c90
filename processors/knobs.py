"""What a request may say about one picture, and what is common to the knobs of pictures and videos: how values are
checked, how one set is laid over another, and how the server's limits are kept and told.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

from vlmserve_common.errors import BadRequestError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_CODE = "invalid_value"
LARGEST = 2**53
"""Above it JSON readers disagree about whole numbers."""
_RANGES = (
    ("min_frames", "max_frames"),
    ("min_pixels", "max_pixels"),
    ("min_pixels", "total_pixels"),
    ("shortest_edge", "longest_edge"),
)
"""Knobs of which the first must not exceed the second."""
_SAMPLING = frozenset(("fps", "num_frames", "count_word", "do_sample_frames"))
"""Ways to choose frames, which stand for each other."""
AREAS = ("min_pixels", "max_pixels", "total_pixels")
"""Knobs in whose place a size stands, where one is given (`resized_height`, `resized_width`)."""
_Knobs = TypeVar("_Knobs", bound="DataclassInstance")


@dataclass(frozen=True, kw_only=True, slots=True)
class Clamp:
    """A value that a limit of the server changed.

    knob: its name. asked, used: before and after, in the knob's own unit. limit: what was exceeded, in pixels of area,
    or frames. setting: what moves the limit.
    """

    knob: str
    asked: int | float  # a message to another process keeps which of them it is
    used: int | float
    limit: int | float
    setting: str

    def __str__(self) -> str:
        return f"{self.knob} {self.asked} was changed to {self.used}, the limit is {self.limit} ({self.setting})"


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageKnobs:
    """How one picture shall be resized, other than by the checkpoint's settings. All in pixels; None keeps the default.

    min_pixels, max_pixels: area limits. resized_height, resized_width: a size to aim at (both or neither), rounded to
    whole tokens; area limits do not count then, but for the server's (`fetch_image` of qwen_vl_utils).
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    resized_height: int | None = None
    resized_width: int | None = None


def check_image_knobs(knobs: ImageKnobs) -> None:
    """Raises BadRequestError naming the first value that no picture can be processed with."""
    for field in fields(knobs):
        check_count(field.name, getattr(knobs, field.name))
    check_consistent(knobs)


def check_count(name: str, value: object) -> None:
    """Raises BadRequestError unless `value` is None or a positive integer that JSON can carry."""
    if value is not None and (type(value) is not int or value < 1):
        raise BadRequestError(f"{name} is {shown(value)}; it must be a positive integer", code=_CODE)
    if type(value) is int and value > LARGEST:
        raise BadRequestError(f"{name} is {shown(value)}; it must be at most 2**53", code=_CODE)


def check_number(name: str, value: object, what: str, *, least: float, most: float) -> None:
    """Raises BadRequestError unless `value` is None or a number within these bounds. what: it is, for the message."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        bounds = f"at least {least:g} and at most {most:g}"
        raise BadRequestError(f"{name} is {shown(value)}; it must be {what} of {bounds}", code=_CODE)


def areas_without_effect(knobs: object) -> tuple[str, ...]:
    """Those that a size beside them puts aside."""
    return named(knobs, AREAS) if named(knobs, ("resized_height", "resized_width")) else ()


def check_consistent(knobs: DataclassInstance) -> None:
    """Raises BadRequestError for half a size, and for a smallest value above its largest one."""
    given = _given(knobs)
    if ("resized_height" in given) != ("resized_width" in given):
        raise BadRequestError("resized_height and resized_width must be given together", code=_CODE)
    for low, high in _RANGES:
        if low in given and high in given and given[low] > given[high]:
            raise BadRequestError(f"{low} {given[low]} exceeds {high} {given[high]}", code=_CODE)


def laid_over(knobs: _Knobs, base: _Knobs) -> _Knobs:
    """`knobs`, and `base` where it is silent and does not contradict.

    A size in `knobs` drops base's areas, a way to choose frames base's, and a bound base's other one beyond it.
    """
    mine, rest = _given(knobs), _given(base)
    if "resized_height" in mine:
        rest = {name: value for name, value in rest.items() if name not in AREAS}
    if mine.keys() & _SAMPLING:
        rest = {name: value for name, value in rest.items() if name not in _SAMPLING}
    for low, high in _RANGES:
        for name, other, sign in ((low, high, 1), (high, low, -1)):
            if name in mine and other in rest and (mine[name] - rest[other]) * sign > 0:
                del rest[other]
    return replace(knobs, **(rest | mine))


def _given(knobs: DataclassInstance) -> dict[str, Any]:
    values = {field.name: getattr(knobs, field.name) for field in fields(knobs)}
    return {name: value for name, value in values.items() if value is not None}


def shown(value: object) -> str:
    """A value for an error message, whatever its length."""
    if type(value) is int and value.bit_length() > 64:
        return f"a number of about {int(value.bit_length() * math.log10(2)) + 1} digits"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def named(knobs: object, names: Iterable[str]) -> tuple[str, ...]:
    """Those of the fields that are given."""
    return tuple(name for name in names if getattr(knobs, name, None) is not None)


def at_most(name: str, value: int | None, limits: Iterable[tuple[int, str]], found: list[Clamp]) -> int | None:
    """`value`, or the lowest of `limits` (value, setting) if that is lower; this is added to `found` then."""
    limit, setting = min(limits)
    if value is None or value <= limit:
        return value
    found.append(Clamp(knob=name, asked=value, used=limit, limit=limit, setting=setting))
    return limit
