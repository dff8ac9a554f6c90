"""Adaptive sampling: as many frames of a clip as the rule chooses, and more of them where more changes, or near to a
question.

A first pass looks at probes, a few hundred frames over the whole clip at the most. Of a long clip these are keyframes,
which need no frame before them. The change between two probes is the mean difference of their pixels. Half of the
frames are spread evenly over the clip, so that nothing long is missed. The other half goes where the changes are.

For a question there are fewer probes, which an embedder compares with it. A quarter of the frames is spread evenly, and
the rest goes where probes are nearer to the question than usual.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import pairwise
from typing import Any

import numpy as np
from PIL import Image

from processors.video.frame_choice import FrameChoice, frame_range
from processors.video.options import VideoKnobs

MOST_PROBES = 512
"""Frames of the first pass."""
_PROBES_A_SECOND = 2.0
_PROBES_OF_A_KEY = 4
_SIDE = 32  # pixels of a probe, at most about twice as many
_EVEN = 0.5  # the share of frames that is spread evenly
_SCENE = 0.1  # of the range of pixels: a change that is a new scene
_MOST_SCENES = 64  # of a report
MOST_LOOKS = 128
"""Frames of the first pass for a question: each is a picture for the embedder."""
_LOOK_SIDE, _QUALITY = 256, 85  # pixels of its longer side
_EVEN_OF_QUESTION = 0.25
_MOST_DEVIATIONS = 8.0
_MOST_NEAREST = 16  # of a report

Read = Callable[[Sequence[int]], Iterable[np.ndarray]]
"""Decodes frames by number, ascending: uint8 [height, width, 3]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstLook:
    """The frames of a first pass for a question: their numbers, and each as a small JPEG file. There are none if the
    rule's choice stays."""

    places: tuple[int, ...] = ()
    pictures: tuple[bytes, ...] = ()


def look(
    choice: FrameChoice, times: Sequence[float], rate: float, keys: Sequence[int], read: Read, knobs: VideoKnobs
) -> FirstLook:
    """Return the frames that an embedder is to compare with a question. The arguments are those of `adapt`."""
    first, total = frame_range(len(times), rate, knobs.video_start, knobs.video_end)
    if len(choice.indices) >= total:
        return FirstLook()
    places = probe_places(times, keys, first, total, MOST_LOOKS)
    return FirstLook(places=tuple(places), pictures=tuple(map(_small_file, read(places))))


def _small_file(frame: np.ndarray) -> bytes:
    picture, file = Image.fromarray(frame), BytesIO()
    picture.thumbnail((_LOOK_SIDE, _LOOK_SIDE))
    picture.save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()


def adapt(
    choice: FrameChoice, times: Sequence[float], rate: float, keys: Sequence[int], read: Read, knobs: VideoKnobs
) -> FrameChoice:
    """Return other frames in place of a rule's choice, as many.

    `times`: seconds of the clip's frames. `rate`: its average frames per second. `keys`: the numbers of its keyframes.
    If the rule chooses every frame of the part, or repeats some, its choice stays.
    """
    first, total = frame_range(len(times), rate, knobs.video_start, knobs.video_end)
    count, focus = len(choice.indices), knobs.focus
    if count >= total:
        return choice
    about: dict[str, Any]
    if focus is not None and focus.nearness:
        probes = [place for place, _ in focus.nearness]
        near = np.array([nearness for _, nearness in focus.nearness])
        indices = spread_near(probes, near, first, total, count)
        best = np.argsort(-near, kind="stable")[:_MOST_NEAREST].tolist()
        about = {"rule": "question", "nearest": tuple(times[probes[at]] for at in best)}
    else:
        probes = probe_places(times, keys, first, total)
        changes = changes_between(read(probes))
        indices = spread(probes, changes, first, total, count)
        largest = sorted(np.argsort(-changes, kind="stable")[:_MOST_SCENES].tolist())
        scenes = tuple(times[probes[at + 1]] for at in largest if changes[at] >= _SCENE)
        about = {"rule": "adaptive", "scene_changes": scenes, "fallback": "" if focus is None else focus.failure}
    span = times[first + total - 1] - times[first] + 1 / rate
    return replace(
        choice,
        indices=indices,
        times=tuple(times[index] for index in indices),
        fps=count / span,
        probes=len(probes),
        **about,
    )


def probe_places(
    times: Sequence[float], keys: Sequence[int], first: int, total: int, most: int = MOST_PROBES
) -> list[int]:
    """Return the frames to look at, ascending: keyframes if there is one for every fourth probe. If not, evenly spread
    frames, each moved to a keyframe less than half a step away."""
    seconds = times[first + total - 1] - times[first]
    count = int(min(max(seconds * _PROBES_A_SECOND, 2), most, total))
    inside = keys[bisect_left(keys, first) : bisect_left(keys, first + total)]
    if len(inside) * _PROBES_OF_A_KEY >= count:
        return [inside[at] for at in range(0, len(inside), -(-len(inside) // count))]
    step = total / count
    places = set()
    for place in np.linspace(first, first + total - 1, count).round().astype(int).tolist():
        at = bisect_right(inside, place)
        near = inside[max(at - 1, 0) : at + 1]
        key = min(near, key=lambda key: abs(key - place), default=None)
        places.add(place if key is None or abs(key - place) >= step / 2 else key)
    return sorted(places)


def changes_between(frames: Iterable[np.ndarray]) -> np.ndarray:
    """Return the change from each frame to the next, 0 to 1: the mean difference of their pixels, float64. It is 1
    where the size changes."""
    changes, before = [], None
    for frame in frames:
        height, width = frame.shape[:2]
        small = frame[:: max(1, height // _SIDE), :: max(1, width // _SIDE)].astype(np.int16)
        if before is not None:
            same = small.shape == before.shape
            changes.append(float(np.abs(small - before).mean()) / 255 if same else 1.0)
        before = small
    return np.array(changes)


def spread(probes: Sequence[int], changes: np.ndarray, first: int, total: int, count: int) -> tuple[int, ...]:
    """Return `count` different frames of [first, first + total), ascending, which lie closer where changes are larger.

    `changes`: between each probe and the next.
    """
    bounds = np.array([first, *(probes[1:-1]), first + total], dtype=float)
    lengths = np.diff(bounds)
    weights = lengths / total
    if changes.sum() > 0:
        weights = _EVEN * weights + (1 - _EVEN) * changes / changes.sum()
    return _spread(bounds, weights, first, total, count)


def spread_near(probes: Sequence[int], nearness: np.ndarray, first: int, total: int, count: int) -> tuple[int, ...]:
    """Return `count` different frames of [first, first + total), ascending, which lie closer where a question is
    nearer.

    `nearness`: of each probe. A probe stands for the frames that are nearer to it than to others. Embedders differ in
    what is near. So what counts is how much nearer a probe is than the median, in multiples of the root mean square of
    that. Probes that are far do not count.
    """
    middles = [(before + after) / 2 for before, after in pairwise(probes)]
    bounds = np.array([first, *middles, first + total], dtype=float)
    weights = np.diff(bounds) / total
    above = np.maximum(nearness - np.median(nearness), 0)
    deviation = float(np.sqrt((above**2).mean()))
    if deviation > 0:
        near = weights * np.exp(np.minimum(above / deviation, _MOST_DEVIATIONS))
        weights = _EVEN_OF_QUESTION * weights + (1 - _EVEN_OF_QUESTION) * near / near.sum()
    return _spread(bounds, weights, first, total, count)


def _spread(bounds: np.ndarray, weights: np.ndarray, first: int, total: int, count: int) -> tuple[int, ...]:
    reached = np.concatenate([[0.0], weights.cumsum() / weights.sum()])
    wanted = (np.arange(count) + 0.5) / count
    places = np.interp(wanted, reached, bounds).astype(int).tolist()
    for at in range(1, count):  # no frame twice
        places[at] = max(places[at], places[at - 1] + 1)
    last = first + total - 1
    for at in range(count - 1, -1, -1):
        places[at] = min(places[at], last)
        last = places[at] - 1
    return tuple(places)
