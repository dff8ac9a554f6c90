"""What can be in a picture: coloured shapes on a background, as numbers. Nothing is drawn here.

All lengths are in units of the picture's pixels. The random choices are made so that a scene can be described without
doubt: objects do not overlap, and contrast with the background behind them.
"""

from __future__ import annotations

import colorsys
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Rng = np.random.Generator
Rgb = tuple[int, int, int]
Box = tuple[float, float, float, float]
"""x0, y0, x1, y1 in pixels."""
Shape = Literal["circle", "square", "triangle", "star"]

SHAPES: tuple[Shape, ...] = ("circle", "square", "triangle", "star")
# Hue in degrees, saturation and value in 0..1: from, to.
_HSV: dict[str, tuple[tuple[float, float], tuple[float, float], tuple[float, float]]] = {
    "red": ((-10, 8), (0.75, 1), (0.62, 1)),
    "green": ((92, 150), (0.5, 1), (0.38, 1)),
    "blue": ((204, 246), (0.6, 1), (0.5, 1)),
    "yellow": ((48, 62), (0.65, 1), (0.86, 1)),
    "purple": ((266, 304), (0.4, 1), (0.4, 0.85)),
    "orange": ((21, 40), (0.78, 1), (0.88, 1)),
    "black": ((0, 360), (0, 0.5), (0, 0.13)),
    "white": ((0, 360), (0, 0.05), (0.92, 1)),
}
COLOURS: tuple[str, ...] = tuple(_HSV)
CONTRAST = 90
"""Least Euclidean distance in RGB between an object and its background."""

SMALLEST = 0.12
"""Least side of an object's bounding box, as a share of the picture's short side."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Thing:
    """One object. points: its outline, counted around; for a circle (cx, cy) and radius are enough.

    box: of the outline.
    """

    shape: Shape
    colour: str
    rgb: Rgb
    points: tuple[tuple[float, float], ...]
    box: Box

    @property
    def centre(self) -> tuple[float, float]:
        """(x, y) of the bounding box's centre."""
        x0, y0, x1, y1 = self.box
        return (x0 + x1) / 2, (y0 + y1) / 2

    @property
    def name(self) -> str:
        """Such as "red circle"."""
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Print:
    """Printed text. size: of the font, in pixels. face: which of the painter's fonts. anchor: the text's centre."""

    text: str
    face: int
    size: int
    rgb: Rgb
    anchor: tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """One picture. texture: what the background is made of besides its colour; seed: of the texture."""

    width: int
    height: int
    background: Rgb
    texture: str
    strength: float
    seed: int
    things: tuple[Thing, ...] = ()
    prints: tuple[Print, ...] = ()


TEXTURES = ("plain", "grain", "clouds", "gradient", "stripes", "vignette")


def pick_colour(name: str, rng: Rng) -> Rgb:
    """One of the many tints that are called `name`."""
    h, s, v = (rng.uniform(*limits) for limits in _HSV[name])
    red, green, blue = colorsys.hsv_to_rgb(h % 360 / 360, s, v)
    return round(255 * red), round(255 * green), round(255 * blue)


def any_colour(rng: Rng) -> Rgb:
    """Any colour at all; white, black and greys more often than chance has them."""
    if rng.random() < 0.3:
        level = int(rng.choice([255, 245, 230, 200, 128, 64, 20, 0]))
        return level, level, level
    return int(rng.integers(256)), int(rng.integers(256)), int(rng.integers(256))


def distance(a: Rgb, b: Rgb) -> float:
    """Euclidean, 0..442."""
    return math.dist(a, b)


def pick_size(rng: Rng) -> tuple[int, int]:
    """(width, height) of a picture, 64..1024 pixels a side and up to 2:1; small ones more often, for they are quick."""
    low, high = [(64, 128), (128, 320), (320, 512)][rng.choice(3, p=[0.25, 0.65, 0.10])]
    short = math.exp(rng.uniform(math.log(low), math.log(high)))
    ratio = 1.0 if rng.random() < 0.25 else math.exp(rng.uniform(0, math.log(2)))
    sides = round(short), min(1024, round(short * ratio))
    return sides if rng.random() < 0.5 else sides[::-1]


def make_thing(
    shape: Shape, colour: str, rgb: Rgb, centre: tuple[float, float], size: float, rng: Rng, turn: float = 20
) -> Thing:
    """An object whose bounding box has `size` as its longer side and `centre` in its middle. turn: at most, degrees."""
    angle = math.radians(rng.uniform(-turn, turn))
    if shape == "circle":
        outline = [(math.cos(a), math.sin(a)) for a in np.linspace(0, 2 * math.pi, 48, endpoint=False)]
    elif shape == "square":
        outline = [(-1, -1), (1, -1), (1, 1), (-1, 1)]
    elif shape == "triangle":
        height = rng.uniform(0.8, 1.15)
        outline = [(0, -height), (1, height), (-1, height)]
    else:
        inner = rng.uniform(0.37, 0.55)
        points = 5
        outline = [
            (r * math.sin(math.pi * k / points), -r * math.cos(math.pi * k / points))
            for k in range(2 * points)
            for r in [1.0 if k % 2 == 0 else inner]
        ]
    turned = [
        (x * math.cos(angle) - y * math.sin(angle), x * math.sin(angle) + y * math.cos(angle)) for x, y in outline
    ]
    xs, ys = [x for x, _ in turned], [y for _, y in turned]
    x0, x1, y0, y1 = min(xs), max(xs), min(ys), max(ys)
    scale = size / max(x1 - x0, y1 - y0)
    middle = (x0 + x1) / 2, (y0 + y1) / 2
    points_at = tuple((centre[0] + (x - middle[0]) * scale, centre[1] + (y - middle[1]) * scale) for x, y in turned)
    half = (x1 - x0) * scale / 2, (y1 - y0) * scale / 2
    box = centre[0] - half[0], centre[1] - half[1], centre[0] + half[0], centre[1] + half[1]
    return Thing(shape=shape, colour=colour, rgb=rgb, points=points_at, box=box)


def apart(box: Box, others: Sequence[Box], gap: float) -> bool:
    """Whether a box keeps at least `gap` pixels from all `others`."""
    return all(box[2] + gap < o[0] or o[2] + gap < box[0] or box[3] + gap < o[1] or o[3] + gap < box[1] for o in others)


def pick_background(avoid: list[Rgb], rng: Rng) -> Rgb:
    """A colour that contrasts with all of `avoid`; after many vain tries, the best of those seen."""
    best, best_distance = (255, 255, 255), -1.0
    for _ in range(60):
        colour = any_colour(rng)
        nearest = min((distance(colour, other) for other in avoid), default=500.0)
        if nearest >= CONTRAST:
            return colour
        if nearest > best_distance:
            best, best_distance = colour, nearest
    return best


def make_scene(rng: Rng, count: int, size: tuple[int, int] | None = None, smallest: float = SMALLEST * 1.02) -> Scene:
    """A scene of `count` objects, or of fewer where they find no room. smallest: of their sizes, in short sides."""
    width, height = size or pick_size(rng)
    short = min(width, height)
    # Half the scenes use few colours or shapes, so that counting and telling apart is learnt.
    colours = list(rng.choice(COLOURS, rng.integers(1, 3) if rng.random() < 0.3 else len(COLOURS), replace=False))
    shapes = list(rng.choice(SHAPES, rng.integers(1, 3) if rng.random() < 0.3 else len(SHAPES), replace=False))
    background: Rgb | None = None
    things: list[Thing] = []
    largest = {1: 0.85, 2: 0.55, 3: 0.5, 4: 0.42, 5: 0.38}.get(count, 0.34)
    painted: list[tuple[str, Rgb]] = []
    for _ in range(count):
        colour = str(rng.choice(colours))
        painted.append((colour, pick_colour(colour, rng)))
    background = pick_background([rgb for _, rgb in painted], rng)
    for colour, rgb in painted:
        if distance(rgb, background) < CONTRAST:
            continue
        for _ in range(25):
            side = short * math.exp(rng.uniform(math.log(smallest), math.log(largest)))
            thing = make_thing(
                str(rng.choice(shapes)),  # type: ignore[arg-type]
                colour,
                rgb,
                (rng.uniform(side / 2, width - side / 2), rng.uniform(side / 2, height - side / 2)),
                side,
                rng,
            )
            if apart(thing.box, [t.box for t in things], 0.015 * short):
                things.append(thing)
                break
    texture = "plain" if rng.random() < 0.35 else str(rng.choice(TEXTURES))
    return Scene(
        width=width,
        height=height,
        background=background,
        texture=texture,
        strength=float(rng.uniform(0.2, 1)),
        seed=int(rng.integers(2**31)),
        things=tuple(things),
    )
