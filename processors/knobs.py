"""Knobs of one picture, and the functions that pictures and videos share: check values, lay one set over another, apply
the server's limits and report the changes."""

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
"""JSON readers disagree about larger whole numbers."""
_RANGES = (
    ("min_frames", "max_frames"),
    ("min_pixels", "max_pixels"),
    ("min_pixels", "total_pixels"),
    ("shortest_edge", "longest_edge"),
)
"""Pairs of knobs. The first must not exceed the second."""
_SAMPLING = frozenset(("fps", "num_frames", "count_word", "do_sample_frames"))
"""Alternative ways to choose frames: one replaces another."""
AREAS = ("min_pixels", "max_pixels", "total_pixels")
"""Area knobs, which a given size replaces (`resized_height`, `resized_width`)."""
_Knobs = TypeVar("_Knobs", bound="DataclassInstance")


@dataclass(frozen=True, kw_only=True, slots=True)
class Clamp:
    """A value that a server limit changed.

    `knob`: its name. `asked`, `used`: before and after, in the knob's own unit. `limit`: the limit, in pixels of area
    or in frames. `setting`: the setting that changes the limit.
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
    """How a request wants one picture resized. All values are in pixels; None keeps the checkpoint's setting.

    `min_pixels`, `max_pixels`: area limits. `resized_height`, `resized_width`: a size to aim at (both or neither),
    rounded to whole tokens. With a size only the server's area limit applies (`fetch_image` of qwen_vl_utils).
    `skip_repeats`: leave exact repeats out; see `processors.pruning`.
    """

    min_pixels: int | None = None
    max_pixels: int | None = None
    resized_height: int | None = None
    resized_width: int | None = None
    skip_repeats: bool | None = None


def check_image_knobs(knobs: ImageKnobs) -> None:
    """Raise BadRequestError for the first value that no picture can be processed with."""
    for field in fields(knobs):
        check = check_flag if field.name == "skip_repeats" else check_count
        check(field.name, getattr(knobs, field.name))
    check_consistent(knobs)


def check_count(name: str, value: object) -> None:
    """Raise BadRequestError unless `value` is None or a positive integer that JSON can carry."""
    if value is not None and (type(value) is not int or value < 1):
        raise BadRequestError(f"{name} is {shown(value)}; it must be a positive integer", code=_CODE)
    if type(value) is int and value > LARGEST:
        raise BadRequestError(f"{name} is {shown(value)}; it must be at most 2**53", code=_CODE)


def check_flag(name: str, value: object) -> None:
    """Raise BadRequestError unless `value` is None, True or False."""
    if value is not None and not isinstance(value, bool):
        raise BadRequestError(f"{name} is {shown(value)}; it must be true or false", code=_CODE)


def check_number(name: str, value: object, what: str, *, least: float, most: float) -> None:
    """Raise BadRequestError unless `value` is None or a number within the bounds. `what`: describes the value in the
    message."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        bounds = f"at least {least:g} and at most {most:g}"
        raise BadRequestError(f"{name} is {shown(value)}; it must be {what} of {bounds}", code=_CODE)


def areas_without_effect(knobs: object) -> tuple[str, ...]:
    """Return the area knobs that a size makes ineffective."""
    return named(knobs, AREAS) if named(knobs, ("resized_height", "resized_width")) else ()


def check_consistent(knobs: DataclassInstance) -> None:
    """Raise BadRequestError for half a size, or for a smallest value above its largest one."""
    given = _given(knobs)
    if ("resized_height" in given) != ("resized_width" in given):
        raise BadRequestError("resized_height and resized_width must be given together", code=_CODE)
    for low, high in _RANGES:
        if low in given and high in given and given[low] > given[high]:
            raise BadRequestError(f"{low} {given[low]} exceeds {high} {given[high]}", code=_CODE)


def laid_over(knobs: _Knobs, base: _Knobs) -> _Knobs:
    """Return `knobs`, completed by the values of `base` that do not contradict it.

    A size in `knobs` drops base's areas. A way to choose frames drops base's. A bound drops base's other bound if they
    cross.
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
    """Format a value for an error message, however long it is."""
    if type(value) is int and value.bit_length() > 64:
        return f"a number of about {int(value.bit_length() * math.log10(2)) + 1} digits"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def named(knobs: object, names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the fields that have a value."""
    return tuple(name for name in names if getattr(knobs, name, None) is not None)


def at_most(name: str, value: int | None, limits: Iterable[tuple[int, str]], found: list[Clamp]) -> int | None:
    """Return `value`, or the lowest of `limits` (value, setting) if that is lower. A change is added to `found`."""
    limit, setting = min(limits)
    if value is None or value <= limit:
        return value
    found.append(Clamp(knob=name, asked=value, used=limit, limit=limit, setting=setting))
    return limit
