"""Scenes: a few solid things on a background, described exactly, drawn, and saved as picture files.

Every thing lies wholly inside the picture and overlaps no other. The sides of its bounding box are 12% to 50% of the
picture's short side. They have at least ten pixels: in a JPEG file, smaller things become a smudge in some colours. A
thing's colour goes by one name and contrasts with the whole background.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.random import Generator
from PIL import Image

from assets.recipe.exam.chance import log_uniform, pick
from assets.recipe.exam.colours import COLOURS, RGB, sample_colour
from assets.recipe.exam.figures import SHAPES, Box, Field, coverage, extent, signed_distance
from assets.recipe.exam.grounds import Ground, paint_ground, sample_ground
from assets.recipe.exam.texts import Text, write

FileFormat: TypeAlias = Literal["jpeg", "png", "mp4"]

SHORTEST_SIDE, LONGEST_SIDE = 64, 1024  # pixels
SMALLEST_THING, LARGEST_THING = 0.12, 0.50  # of the picture's short side
FEWEST_PIXELS = 10.0
MOST_TURN = math.radians(20)
_TRIES = 40


@dataclass(frozen=True)
class Thing:
    """One solid thing: its names, and where its outline is, in pixels; `turn` in radians, clockwise."""

    shape: str
    colour: str
    rgb: RGB
    x: float
    y: float
    radius: float
    turn: float
    notch: float

    @cached_property
    def box(self) -> Box:
        """The bounding box: left, top, right, bottom, in pixels from the picture's top left corner."""
        left, top, right, bottom = (self.radius * side for side in extent(self.shape, self.turn))
        return self.x + left, self.y + top, self.x + right, self.y + bottom

    @property
    def centre(self) -> tuple[float, float]:
        """The middle of the bounding box, in pixels."""
        left, top, right, bottom = self.box
        return (left + right) / 2, (top + bottom) / 2

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"


@dataclass(frozen=True)
class Scene:
    """A picture before it is drawn, or a frame of a clip (an MP4 file).

    `quality` is the JPEG encoder's and counts for JPEG files only. The `text`, if any, overlaps no thing.
    """

    width: int
    height: int
    things: tuple[Thing, ...]
    ground: Ground
    file_format: FileFormat
    quality: int
    text: Text | None = None

    @property
    def short_side(self) -> int:
        return min(self.width, self.height)

    @property
    def contents(self) -> tuple[str, ...]:
        """The contents, for people to read: "red circle", 'the text "TEA" in DejaVu Sans'."""
        names = tuple(thing.name for thing in self.things)
        return names if self.text is None else (*names, f'the text "{self.text.characters}" in {self.text.face}')

    def having(self, *, colour: str | None = None, shape: str | None = None) -> tuple[Thing, ...]:
        """The things of that colour, of that shape, or of both."""
        return tuple(thing for thing in self.things if colour in (None, thing.colour) and shape in (None, thing.shape))


@dataclass(frozen=True)
class Picture:
    """A scene and the bytes of its file."""

    scene: Scene
    data: bytes

    @property
    def url(self) -> str:
        """The file as a `data:` URL."""
        return f"data:image/{self.scene.file_format};base64,{base64.b64encode(self.data).decode()}"

    @property
    def part(self) -> dict[str, Any]:
        """The picture as a part of a message."""
        return {"type": "image_url", "image_url": {"url": self.url}}


def make_scene(rng: Generator, fewest: int = 1, most: int = 3) -> Scene:
    """A random scene of `fewest` to `most` things (one to six make sense): the same `rng` state, the same scene."""
    count = int(rng.integers(fewest, most + 1))
    width, height = pick_sides(rng)
    while True:
        things = place_things(rng, count, width, height)
        ground = sample_ground(rng, [thing.rgb for thing in things]) if things else None
        if ground is not None:
            break
    return Scene(width, height, things, ground, *pick_file(rng))


def draw(scene: Scene) -> npt.NDArray[np.uint8]:
    """The scene's pixels, `[height, width, 3]`, red green blue."""
    canvas = paint_ground(scene.ground, scene.width, scene.height)
    paint_things(canvas, scene.things)
    if scene.text is not None:
        write(canvas, scene.text)
    return to_pixels(canvas)


def paint_things(canvas: Field, things: Iterable[Thing]) -> None:
    """Paint `things` on `canvas`, `[height, width, 3]` in 0..255, in place."""
    height, width = canvas.shape[:2]
    for thing in things:
        left, top, right, bottom = thing.box
        columns = slice(max(math.floor(left) - 1, 0), min(math.ceil(right) + 1, width))
        rows = slice(max(math.floor(top) - 1, 0), min(math.ceil(bottom) + 1, height))
        x = (np.arange(columns.start, columns.stop) + (0.5 - thing.x)).astype(np.float32)[None, :]
        y = (np.arange(rows.start, rows.stop) + (0.5 - thing.y)).astype(np.float32)[:, None]
        share = coverage(signed_distance(thing.shape, x, y, thing.radius, thing.turn, thing.notch))[:, :, None]
        canvas[rows, columns] += share * (np.array(thing.rgb, np.float32) - canvas[rows, columns])


def to_pixels(canvas: Field) -> npt.NDArray[np.uint8]:
    """`canvas`, `[height, width, 3]` in 0..255, in whole numbers."""
    return np.clip(canvas.round(), 0, 255).astype(np.uint8)


def take_picture(scene: Scene) -> Picture:
    """Draw the scene and save it in its file format."""
    file = io.BytesIO()
    options = {"quality": scene.quality} if scene.file_format == "jpeg" else {"compress_level": 4}
    Image.fromarray(draw(scene)).save(file, scene.file_format, **options)
    return Picture(scene, file.getvalue())


def pick_sides(rng: Generator, shortest: int = SHORTEST_SIDE) -> tuple[int, int]:
    """Width and height in pixels: the short side log-uniform, so that no range of sizes is rare; at most 2:1."""
    short = round(log_uniform(rng, shortest, LONGEST_SIDE))
    aspect = 1.0 if rng.random() < 0.2 else log_uniform(rng, 1, 2)
    long = min(int(short * aspect), LONGEST_SIDE)
    return (short, long) if rng.random() < 0.5 else (long, short)


def pick_file(rng: Generator) -> tuple[FileFormat, int]:
    """A picture's file format and quality."""
    return "jpeg" if rng.random() < 0.6 else "png", int(rng.integers(60, 96))


def place_things(rng: Generator, count: int, width: int, height: int, taken: Sequence[Box] = ()) -> tuple[Thing, ...]:
    """`count` things apart from each other and from the boxes `taken`, or none at all if one of them finds no room."""
    things: list[Thing] = []
    for _ in range(count):
        # A colour comes back more often than chance has it: telling such things apart is part of the exam.
        colour = pick(rng, things).colour if things and rng.random() < 0.15 else pick(rng, COLOURS)
        shape, rgb = pick(rng, SHAPES), sample_colour(rng, colour)
        make = partial(make_thing, rng, shape, colour, rgb, width, height)
        thing = fit_thing(make, [*taken, *(other.box for other in things)], min(width, height))
        if thing is None:
            return ()
        things.append(thing)
    return tuple(things)


def fit_thing(make: Callable[[], Thing], taken: Sequence[Box], short: int) -> Thing | None:
    """The first thing of `make` apart from the boxes `taken`, in a picture whose short side is `short` pixels.

    None where a few tries find no room.
    """
    gap = max(2.0, 0.02 * short)
    for _ in range(_TRIES):
        thing = make()
        if not any(_touch(thing.box, box, gap) for box in taken):
            return thing
    return None


def make_thing(
    rng: Generator,
    shape: str,
    colour: str,
    rgb: RGB,
    width: int,
    height: int,
    sizes: tuple[float, float] = (SMALLEST_THING, LARGEST_THING),
) -> Thing:
    """A thing anywhere in the picture; `sizes`: its sides' limits as shares of the picture's short side."""
    turn = rng.uniform(-MOST_TURN, MOST_TURN)
    left, top, right, bottom = extent(shape, turn)
    narrow, wide = sorted((right - left, bottom - top))
    short = min(width, height)
    smallest = max(sizes[0] * short, FEWEST_PIXELS)
    radius = log_uniform(rng, smallest / narrow, sizes[1] * short / wide)
    x = rng.uniform(1 - radius * left, width - 1 - radius * right)
    y = rng.uniform(1 - radius * top, height - 1 - radius * bottom)
    return Thing(shape, colour, rgb, x, y, radius, turn, notch=rng.uniform(0.38, 0.5))


def _touch(one: Sequence[float], two: Sequence[float], gap: float) -> bool:
    """Whether two bounding boxes come nearer to each other than `gap` pixels."""
    return all(one[axis] - gap < two[axis + 2] and two[axis] - gap < one[axis + 2] for axis in (0, 1))
