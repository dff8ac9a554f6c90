"""The eight colours that things may have. Each is a range in which no reader would use another colour's name."""

from __future__ import annotations

import colorsys
from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeAlias

from numpy.random import Generator

RGB: TypeAlias = tuple[int, int, int]
Range: TypeAlias = tuple[float, float]

# Hue in degrees, saturation, value. The gaps between the hues are where people start to disagree.
_TINTS: Mapping[str, tuple[Range, Range, Range]] = MappingProxyType(
    {
        "red": ((-6, 6), (0.78, 0.95), (0.78, 0.95)),
        "green": ((108, 142), (0.65, 1.0), (0.50, 0.85)),
        "blue": ((214, 238), (0.72, 0.98), (0.72, 1.0)),
        "yellow": ((50, 60), (0.75, 1.0), (0.93, 1.0)),
        "purple": ((275, 298), (0.60, 0.95), (0.50, 0.72)),
        "orange": ((25, 36), (0.85, 1.0), (0.92, 1.0)),
    }
)
_GREYS: Mapping[str, tuple[int, int]] = MappingProxyType({"black": (0, 28), "white": (237, 255)})

COLOURS: tuple[str, ...] = (*_TINTS, *_GREYS)


def sample_colour(rng: Generator, name: str) -> RGB:
    """A colour, 0..255 a channel, that goes by `name` (one of COLOURS)."""
    if name in _GREYS:
        low, high = _GREYS[name]
        red, green, blue = (int(rng.integers(low, high + 1)) for _ in range(3))
        return red, green, blue
    hue, saturation, value = (rng.uniform(*limits) for limits in _TINTS[name])
    red, green, blue = (round(255 * part) for part in colorsys.hsv_to_rgb(hue / 360 % 1, saturation, value))
    return red, green, blue
