"""Backgrounds: two colours blended by a field, so that every pixel lies on the line between them.

The promise of contrast is therefore exact: a colour that keeps its distance from the line keeps it from every pixel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.random import Generator, default_rng

from assets.recipe.exam.chance import pick
from assets.recipe.exam.colours import RGB
from assets.recipe.exam.figures import Field

Texture: TypeAlias = Literal["plain", "gradient", "grain", "stripes", "blotches"]
TEXTURES: tuple[Texture, ...] = get_args(Texture)
LEAST_CONTRAST = 110.0  # RGB distance between a thing and any pixel of its background
LEAST_LUMA_CONTRAST = 70.0  # of 255, in brightness, between a text and any pixel of its background
_TRIES = 60


@dataclass(frozen=True)
class Ground:
    """A background: a texture of two colours (the same twice where it is plain), and the seed of its details."""

    texture: Texture
    colour: RGB
    other: RGB
    seed: int

    def contrast(self, rgb: RGB) -> float:
        """The least RGB distance between `rgb` and any pixel of this background."""
        start, end, point = (np.array(value, np.float64) for value in (self.colour, self.other, rgb))
        line = end - start
        share = np.clip(np.dot(point - start, line) / max(np.dot(line, line), 1e-9), 0, 1)
        return float(np.linalg.norm(point - start - share * line))

    def luma_contrast(self, rgb: RGB) -> float:
        """The least difference in brightness between `rgb` and any pixel of this background."""
        gaps = _luma(rgb) - _luma(self.colour), _luma(rgb) - _luma(self.other)
        return min(abs(gap) for gap in gaps) if gaps[0] * gaps[1] > 0 else 0.0


def sample_ground(rng: Generator, beside: Sequence[RGB], legible: Sequence[RGB] = ()) -> Ground | None:
    """A background that contrasts with every colour in `beside` and in `legible`, with the latter in brightness too.

    None where a few tries find none.
    """
    for _ in range(_TRIES):
        texture = pick(rng, TEXTURES)
        colour = _any_colour(rng)
        reach = {"plain": 0.0, "gradient": rng.uniform(30, 110)}.get(texture, rng.uniform(12, 40))
        direction = rng.normal(size=3)
        moved = np.clip(np.array(colour) + reach * direction / np.linalg.norm(direction), 0, 255)
        red, green, blue = (int(channel) for channel in moved.round())
        ground = Ground(texture, colour, (red, green, blue), int(rng.integers(2**31)))
        if all(ground.contrast(rgb) > LEAST_CONTRAST for rgb in (*beside, *legible)) and all(
            ground.luma_contrast(rgb) > LEAST_LUMA_CONTRAST for rgb in legible
        ):
            return ground
    return None


def paint_ground(ground: Ground, width: int, height: int) -> Field:
    """The background, `[height, width, 3]` float32 in 0..255."""
    start, end = (np.array(value, np.float32) for value in (ground.colour, ground.other))
    blend = _field(ground, width, height)
    return start + blend[:, :, None] * (end - start)


def _luma(rgb: RGB) -> float:
    """Brightness, 0..255, as JPEG files reckon it (ITU-R BT.601)."""
    return 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2]


def _any_colour(rng: Generator) -> RGB:
    """White, black and grey, as pictures often have behind them, or any colour at all."""
    kind = rng.random()
    if kind < 0.5:
        low, high = (232, 255) if kind < 0.22 else (0, 30) if kind < 0.3 else (60, 225)
        level, drift = rng.integers(low, high + 1), rng.integers(-5, 6, size=3)
        red, green, blue = (int(channel) for channel in np.clip(level + drift, 0, 255))
    else:
        red, green, blue = (int(channel) for channel in rng.integers(0, 256, size=3))
    return red, green, blue


def _field(ground: Ground, width: int, height: int) -> Field:
    """How far each pixel is from the first colour towards the second: `[height, width]`, 0..1."""
    rng = default_rng(ground.seed)
    short = min(width, height)
    x = (np.arange(width, dtype=np.float32) + 0.5)[None, :]
    y = (np.arange(height, dtype=np.float32) + 0.5)[:, None]
    angle = rng.uniform(0, math.tau)
    across, down = np.float32(math.cos(angle)), np.float32(math.sin(angle))
    match ground.texture:
        case "plain":
            return np.zeros((height, width), np.float32)
        case "gradient":
            ramp = x * across + y * down
            if rng.random() < 0.3:  # round a point rather than along a line
                from_x, from_y = (np.float32(rng.uniform(0.2, 0.8)) for _ in range(2))
                ramp = np.hypot(x - width * from_x, y - height * from_y)
            return (ramp - ramp.min()) / (ramp.max() - ramp.min())
        case "grain":
            return rng.random((height, width), np.float32)
        case "stripes":
            waves = np.float32(math.tau * rng.uniform(3, 12) / short)
            wave: Field = np.sin((x * across + y * down) * waves)
            return np.clip(0.5 + 0.75 * wave, 0, 1)
        case "blotches":
            total = np.zeros((height, width), np.float32)
            for across_waves, down_waves, phase in rng.normal(size=(7, 3)) * (9.0 / short, 9.0 / short, 3.0):
                total += np.cos(x * np.float32(across_waves) + y * np.float32(down_waves) + np.float32(phase))
            return np.clip(0.5 + total / 8, 0, 1)
