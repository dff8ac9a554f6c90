"""Shapes as signed distance fields: how far each pixel is from the outline, in pixels, negative inside.

A square, a triangle and a star are one formula. Folding the plane into the wedge between a tip and the notch beside it
leaves one straight edge, whose distance is a dot product. A polygon with straight sides is a star whose notches lie on
the line between two tips.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Field: TypeAlias = npt.NDArray[np.float32]
Box: TypeAlias = tuple[float, float, float, float]  # left, top, right, bottom

_TIPS: Mapping[str, int] = MappingProxyType({"square": 4, "triangle": 3, "star": 5})
SHAPES: tuple[str, ...] = ("circle", *_TIPS)


def extent(shape: str, turn: float) -> Box:
    """The bounding box of `shape` with radius 1 around (0, 0), `turn` radians clockwise; y grows downwards."""
    if shape == "circle":
        return -1.0, -1.0, 1.0, 1.0
    angles = [_first_tip(shape) + turn + math.tau * tip / _TIPS[shape] for tip in range(_TIPS[shape])]
    xs, ys = [math.sin(angle) for angle in angles], [-math.cos(angle) for angle in angles]
    return min(xs), min(ys), max(xs), max(ys)


def signed_distance(shape: str, x: Field, y: Field, radius: float, turn: float, notch: float) -> Field:
    """Distance in pixels of the points (`x`, `y`), relative to the shape's origin, from its outline.

    `radius` is the tips' distance from the origin; `notch` is the notches', as a share of it, and counts for stars.
    """
    away = np.hypot(x, y)
    if shape == "circle":
        return away - np.float32(radius)
    half = math.pi / _TIPS[shape]
    share = notch if shape == "star" else math.cos(half)
    angle = np.arctan2(x, -y) - np.float32(_first_tip(shape) + turn)
    folded = np.abs((angle + half) % (2 * half) - half)
    normal_x, normal_y = share * math.sin(half), 1 - share * math.cos(half)
    length = math.hypot(normal_x, normal_y)
    along = away * np.cos(folded) - np.float32(radius)
    return along * np.float32(normal_x / length) + away * np.sin(folded) * np.float32(normal_y / length)


def coverage(distance: Field) -> Field:
    """How much of each pixel is covered, 0..1: a smooth step, one and a half pixels wide, over the outline."""
    step = np.clip(0.5 - distance / np.float32(1.5), 0, 1)
    return step * step * (3 - 2 * step)


def _first_tip(shape: str) -> float:
    return math.pi / 4 if shape == "square" else 0.0  # upright: a square lies on its side, all other shapes point up
