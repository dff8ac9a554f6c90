"""Short clips: one thing moves or changes its colour, all other things stay. Frames are scenes; nothing is drawn here.

Frames are sampled as Qwen3-VL's video processor does: a number of them from the clip's length, spread evenly.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from assets.recipe.sizes import TEMPORAL_PATCH
from assets.recipe.world import (
    COLOURS,
    CONTRAST,
    SHAPES,
    Rng,
    Scene,
    Thing,
    apart,
    distance,
    make_scene,
    make_thing,
    pick_colour,
)

FPS, MIN_FRAMES, MAX_FRAMES = 2.0, 4, 12
Event = Literal["left", "right", "up", "down", "still", "colour"]
MOVES: Mapping[Event, tuple[int, int]] = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
"""The events in which something moves, and where to: right and down count up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """frames: an even number, two to a temporal patch; times: of each, seconds. The first thing of each is the actor.

    later_colour, change_time: for event "colour", the actor's new colour, and the time of the change in seconds.
    """

    frames: tuple[Scene, ...]
    times: tuple[float, ...]
    event: Event
    later_colour: str = ""
    change_time: float = 0.0

    @property
    def thing(self) -> Thing:
        """The actor as it is at first."""
        return self.frames[0].things[0]

    @property
    def label_times(self) -> tuple[float, ...]:
        """The time that each temporal patch is labelled with, seconds."""
        starts = range(0, len(self.times), TEMPORAL_PATCH)
        return tuple(sum(self.times[k : k + TEMPORAL_PATCH]) / TEMPORAL_PATCH for k in starts)

    @property
    def actor_colours(self) -> Mapping[str, str]:
        """The actor's colour at each label time ("1.5"). Times whose two frames differ are left out."""
        pairs = zip(self.label_times, self.frames[::TEMPORAL_PATCH], self.frames[1::TEMPORAL_PATCH], strict=True)
        colours = ((time, one.things[0].colour, other.things[0].colour) for time, one, other in pairs)
        return {f"{time:.1f}": one for time, one, other in colours if one == other}

    @property
    def change_seen(self) -> float:
        """For event "colour": the time that the first temporal patch which shows the change is labelled with."""
        first = next(k for k, time in enumerate(self.times) if time > self.change_time)
        return self.label_times[first // TEMPORAL_PATCH]


def sample_times(duration: float, rate: float) -> tuple[float, ...]:
    """Times of the frames that are looked at, of a clip of `duration` seconds at `rate` frames a second."""
    total = max(2, round(duration * rate))
    wanted = min(max(int(total / rate * FPS), MIN_FRAMES), MAX_FRAMES, total)
    indices = np.linspace(0, total - 1, wanted).round().astype(int).tolist()
    indices += indices[-1:] * (len(indices) % 2)
    return tuple(index / rate for index in indices)


def make_clip(rng: Rng) -> Clip:
    """A random clip, 2 to 6 seconds."""
    width, height = (int(v) for v in rng.integers(112, 225, 2))
    short = min(width, height)
    while True:
        scene = make_scene(rng, int(rng.choice([1, 2], p=[0.6, 0.4])), (width, height))
        if scene.things:
            break
    scene = dataclasses.replace(scene, strength=min(scene.strength, 0.6))
    actor = int(rng.integers(len(scene.things)))
    times = sample_times(float(rng.uniform(2, 6)), float(rng.choice([8, 10, 12, 15, 24, 25, 30])))
    share = np.asarray(times) / times[-1]
    event: Event = [*MOVES, "still", "colour"][int(rng.choice(6, p=[0.13, 0.13, 0.13, 0.13, 0.14, 0.34]))]
    others = tuple(t for k, t in enumerate(scene.things) if k != actor)
    shape, colour = SHAPES[int(rng.integers(4))], str(rng.choice(COLOURS))
    rgb = pick_colour(colour, rng)
    while distance(rgb, scene.background) < CONTRAST:
        colour = str(rng.choice(COLOURS))
        rgb = pick_colour(colour, rng)
    size = short * rng.uniform(0.18, 0.4)
    start = np.asarray([rng.uniform(size / 2, width - size / 2), rng.uniform(size / 2, height - size / 2)])
    if event in MOVES:
        axis = np.asarray(MOVES[event], float)
        room = np.asarray([width, height]) - size
        reach = float(abs(axis @ room))
        travel = rng.uniform(0.35, 1.0) * reach
        first = size / 2 + rng.uniform(0, reach - travel)
        k = 0 if axis[0] else 1
        start[k] = first if axis[k] > 0 else first + travel
        shift = axis * travel
    else:
        shift = np.zeros(2)
    ends = np.stack([start, start + shift])
    swept = (*(ends.min(0) - size / 2), *(ends.max(0) + size / 2))
    others = tuple(t for t in others if t.shape != shape and t.colour != colour and apart(swept, [t.box], 2))
    original = make_thing(shape, colour, rgb, (0.0, 0.0), size, rng)
    later_colour, change_time, later_rgb = "", 0.0, rgb
    if event == "colour":
        later_colour = str(rng.choice([c for c in COLOURS if c != colour and c not in {t.colour for t in others}]))
        later_rgb = pick_colour(later_colour, rng)
        for _ in range(30):
            if distance(later_rgb, scene.background) >= CONTRAST:
                break
            later_colour = str(rng.choice([c for c in COLOURS if c != colour and c not in {t.colour for t in others}]))
            later_rgb = pick_colour(later_colour, rng)
        boundary = int(rng.integers(2, len(set(times))))  # no time passes before a last frame's repetition
        change_time = (times[boundary - 1] + times[boundary]) / 2
    frames = []
    for time, part in zip(times, share, strict=True):
        at = start + shift * part
        changed = event == "colour" and time > change_time
        thing = dataclasses.replace(
            original,
            points=tuple((x + at[0], y + at[1]) for x, y in original.points),
            box=tuple(v + at[k % 2] for k, v in enumerate(original.box)),
            colour=later_colour if changed else colour,
            rgb=later_rgb if changed else rgb,
        )
        frames.append(dataclasses.replace(scene, things=(thing, *others)))
    return Clip(frames=tuple(frames), times=times, event=event, later_colour=later_colour, change_time=change_time)
