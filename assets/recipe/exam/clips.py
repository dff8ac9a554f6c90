"""Short clips: one thing moves, or stays and changes its colour, or nothing happens; other things stay as they are.

A clip lasts 2 to 6 seconds. Its things have 15% to 40% of its short side, differ in colour and in shape, and keep apart
all the time. A thing that moves does so steadily, along one axis, by 35% or more of the way that there is. A thing that
changes its colour does so at once, not within 0.7 s of either end, to a colour that nothing else has. All things
contrast with the whole background.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, cast, get_args

import av
import numpy as np
import numpy.typing as npt
from av.video.stream import VideoStream
from numpy.random import Generator

from assets.recipe.exam.chance import pick
from assets.recipe.exam.colours import COLOURS, RGB, sample_colour
from assets.recipe.exam.figures import SHAPES, Box
from assets.recipe.exam.grounds import paint_ground, sample_ground
from assets.recipe.exam.scenes import Scene, Thing, fit_thing, make_thing, paint_things, to_pixels

Way: TypeAlias = Literal["left", "right", "up", "down"]
Codec: TypeAlias = Literal["libx264", "mpeg4"]
Happening: TypeAlias = Literal["move", "change", "nothing"]

WAYS: tuple[Way, ...] = get_args(Way)
SHORTEST, LONGEST = 2.0, 6.0  # seconds
SHORTEST_SIDE, LONGEST_SIDE = 112, 256  # pixels
RATES = (8, 10, 12, 15, 24, 25, 30)  # frames a second
SIZES = (0.15, 0.40)  # of things, as shares of the short side
LEAST_TRAVEL = 0.35  # of the side on that axis, less the thing's own
QUIET = 0.7  # seconds at either end
_STEPS: Mapping[Way, tuple[int, int]] = MappingProxyType(
    {"left": (0, -1), "right": (0, 1), "up": (1, -1), "down": (1, 1)}
)


@dataclass(frozen=True)
class Move:
    """The actor goes `way`, by `dx` and `dy` pixels from the first frame to the last."""

    way: Way
    dx: float
    dy: float


@dataclass(frozen=True)
class Change:
    """The actor has another colour from `seconds` on, which is the time of a frame."""

    colour: str
    rgb: RGB
    seconds: float


@dataclass(frozen=True)
class Play:
    """A clip before it is drawn: how it looks at first (`first`), and the event. The first thing of `first` is the
    actor.

    `rate` is in frames a second, `crf` the H.264 encoder's rate factor (smaller is better).
    """

    first: Scene
    event: Move | Change | None
    rate: int
    frames: int
    crf: int

    @property
    def actor(self) -> Thing:
        """The actor as it is at first."""
        return self.first.things[0]

    @property
    def seconds(self) -> float:
        return self.frames / self.rate

    def actor_at(self, number: int) -> Thing:
        """The actor in frame `number`, from 0."""
        match self.event:
            case Move(_, dx, dy):
                share = number / (self.frames - 1)
                return replace(self.actor, x=self.actor.x + dx * share, y=self.actor.y + dy * share)
            case Change(colour, rgb, seconds) if number >= round(seconds * self.rate):
                return replace(self.actor, colour=colour, rgb=rgb)
        return self.actor


@dataclass(frozen=True)
class Clip:
    """A play and the bytes of its MP4 file."""

    play: Play
    data: bytes

    @property
    def scene(self) -> Scene:
        """How it looks at first."""
        return self.play.first

    @property
    def part(self) -> dict[str, Any]:
        """The clip as a part of a message, its file a `data:` URL."""
        url = f"data:video/mp4;base64,{base64.b64encode(self.data).decode()}"
        return {"type": "video_url", "video_url": {"url": url}}


def make_play(rng: Generator, happening: Happening, shortest: float = SHORTEST) -> Play:
    """A random play in which that happens, of `shortest` seconds or more."""
    rate = pick(rng, RATES)
    frames = round(rng.uniform(shortest, LONGEST) * rate)
    width, height = _sides(rng)
    beside = pick(rng, (0, 0, 1, 1, 2))
    while True:
        shapes = [SHAPES[index] for index in rng.permutation(len(SHAPES))]
        colours = [COLOURS[index] for index in rng.permutation(len(COLOURS))]
        rgbs = [sample_colour(rng, colour) for colour in colours]
        event: Move | Change | None = None
        actor = make_thing(rng, shapes[0], colours[0], rgbs[0], width, height, SIZES)
        ends = [actor]
        if happening == "move":
            actor, event = _move(rng, actor, width, height)
            ends = [actor, replace(actor, x=actor.x + event.dx, y=actor.y + event.dy)]
        elif happening == "change":
            quiet = math.ceil(QUIET * rate)
            event = Change(colours[-1], rgbs[-1], int(rng.integers(quiet, frames - quiet + 1)) / rate)
        things = [actor]
        for index in range(1, beside + 1):
            taken = [_around(ends), *(thing.box for thing in things[1:])]
            make = partial(make_thing, rng, shapes[index], colours[index], rgbs[index], width, height, SIZES)
            other = fit_thing(make, taken, min(width, height))
            things += [other] if other else []
        shown = [thing.rgb for thing in things] + ([event.rgb] if isinstance(event, Change) else [])
        ground = sample_ground(rng, shown) if len(things) == 1 + beside else None
        if ground is not None:
            first = Scene(width, height, tuple(things), ground, "mp4", 0)
            return Play(first, event, rate, frames, int(rng.integers(16, 29)))


def draw_frames(play: Play) -> Iterator[npt.NDArray[np.uint8]]:
    """The frames in turn, each `[height, width, 3]`, red green blue."""
    still = paint_ground(play.first.ground, play.first.width, play.first.height)
    paint_things(still, play.first.things[1:])
    for number in range(play.frames):
        canvas = still.copy()
        paint_things(canvas, [play.actor_at(number)])
        yield to_pixels(canvas)


def film(play: Play) -> Clip:
    """Draw the play and encode it as H.264, or as MPEG-4 part 2 where PyAV comes without that encoder."""
    return Clip(play, encode(play, "libx264" if "libx264" in av.codecs_available else "mpeg4"))


def encode(play: Play, codec: Codec) -> bytes:
    """The play's MP4 file."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = cast(VideoStream, container.add_stream(codec, rate=play.rate))
        stream.width, stream.height, stream.pix_fmt = play.first.width, play.first.height, "yuv420p"
        stream.codec_context.thread_count = (
            1  # small clips: more threads are no faster, and give other bytes by their number
        )
        if codec == "libx264":
            stream.options = {"crf": str(play.crf), "preset": "veryfast"}
        else:
            stream.bit_rate = 2_000_000
        for pixels in draw_frames(play):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def _sides(rng: Generator) -> tuple[int, int]:
    """Width and height in pixels, even (as the encoders want them), at most 2:1."""
    while True:
        width, height = (2 * int(half) for half in rng.integers(SHORTEST_SIDE // 2, LONGEST_SIDE // 2 + 1, size=2))
        if max(width, height) <= 2 * min(width, height):
            return width, height


def _move(rng: Generator, thing: Thing, width: int, height: int) -> tuple[Thing, Move]:
    """`thing` where it starts, and how it goes."""
    way = pick(rng, WAYS)
    axis, sign = _STEPS[way]
    side, low, high = (width, height)[axis], thing.box[axis], thing.box[axis + 2]
    room = side - (high - low)
    travel = rng.uniform(LEAST_TRAVEL * room, room - 2)  # one pixel from either edge
    near = 1 + rng.uniform(0, room - 2 - travel)
    shift = (near if sign > 0 else near + travel) - low
    start = replace(thing, x=thing.x + shift) if axis == 0 else replace(thing, y=thing.y + shift)
    return start, Move(way, *((sign * travel, 0.0) if axis == 0 else (0.0, sign * travel)))


def _around(things: Iterable[Thing]) -> Box:
    """The bounding box of `things` together."""
    left, top, right, bottom = zip(*(thing.box for thing in things), strict=True)
    return min(left), min(top), max(right), max(bottom)
