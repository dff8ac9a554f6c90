"""Chooses the frames of a clip: by number as a reference does, every one, or by time on a grid.

A request's values win over the checkpoint's, and the server's limit holds for both. The references' own rules follow
below as plain functions. A reference can fail on a clip of one frame: it divides by zero, or finds an empty range. Here
that frame is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

from processors.knobs import Clamp, at_most
from processors.video.options import RuleSettings, VideoKnobs
from vlmserve_common.errors import BadRequestError

_MAX_FRAMES_SETTING = "setting --max-video-frames"
_BOUNDS = ("min_frames", "max_frames")


@dataclass(frozen=True, kw_only=True, slots=True)
class ClipInfo:
    """A clip, or a list of frames. `width`, `height`: of a frame as shown, in pixels. `rate`: average frames per
    second.

    `times`: seconds of each frame from the start of the file, in order.
    """

    width: int
    height: int
    rate: float
    times: tuple[float, ...]

    @property
    def num_frames(self) -> int:
        return len(self.times)


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameChoice:
    """The frames to use. `indices`: their numbers in the clip, ascending. `times`: their times in seconds. `fps`:
    frames used per second of the clip.

    `rule`: the rule's name. `clamps`: knobs that limits changed. `ignored`: knobs without effect. `probes`,
    `scene_changes`: frames that the first pass of adaptive sampling looked at, and the seconds at which it saw a new
    scene, the largest changes if there are many. `nearest`: the seconds nearest to a question, the nearest first.
    `fallback`: why frames were not chosen by it.
    """

    indices: tuple[int, ...]
    times: tuple[float, ...]
    fps: float
    rule: str
    clamps: tuple[Clamp, ...] = ()
    ignored: tuple[str, ...] = ()
    probes: int = 0
    scene_changes: tuple[float, ...] = ()
    nearest: tuple[float, ...] = ()
    fallback: str = ""


class Sampler(Protocol):
    """A reference's rule: a clip's number of frames and rate (frames per second) -> indices in ascending order."""

    def __call__(
        self, total: int, rate: float, *, fps: float, num_frames: int | None, min_frames: int, max_frames: int
    ) -> list[int]: ...


FrameChooser: TypeAlias = Callable[[Sequence[float], float, VideoKnobs], FrameChoice]
"""Chooses frames by the times of the clip's frames (seconds from the start of the file), its average rate and checked
knobs."""


def every_frame(times: Sequence[float], rate: float, knobs: VideoKnobs) -> FrameChoice:
    """Choose every frame, for do_sample_frames false. Raises BadRequestError when the request also gives a number."""
    for asked in knobs.given(("fps", "num_frames")):
        raise BadRequestError(
            f"do_sample_frames false takes every frame of a video file, so {asked} cannot be given",
            code="invalid_value",
        )
    first, total = frame_range(len(times), rate, knobs.video_start, knobs.video_end)
    indices = range(first, first + total)
    return FrameChoice(
        indices=tuple(indices), times=_times(indices, rate), fps=rate, rule="all", ignored=knobs.given(_BOUNDS)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ByNumber:
    """Chooses frames by a reference's rule.

    `rule`: its name. `multiple`: numbers of frames are rounded to multiples of this, which are whole temporal patches.
    """

    settings: RuleSettings
    sample: Sampler
    rule: str = "transformers"
    multiple: int = 1

    def __call__(self, times: Sequence[float], rate: float, knobs: VideoKnobs) -> FrameChoice:
        """Choose the frames of `sample`. Raises BadRequestError when the clip has too few for it."""
        first, total = frame_range(len(times), rate, knobs.video_start, knobs.video_end)
        counted, found = self._count(knobs)
        if counted is None:
            least, most, setting = self._bounds(knobs, found)
        else:
            least, most, setting = 1, self.settings.max_frames, _MAX_FRAMES_SETTING
        fps = knobs.fps or self.settings.default_fps
        try:
            chosen = self.sample(total, rate, fps=fps, num_frames=counted, min_frames=least, max_frames=most)
        except BadRequestError as error:
            what = error.message if knobs.num_frames is None else f"{knobs.word('num_frames')}: {error.message}"
            raise BadRequestError("; ".join([what, *map(str, found)]), code=error.code) from None
        used = len(chosen) / total * rate
        if knobs.fps is not None:
            found += _changed_rate(fps, used, min(total / rate * fps, total), least, (most, setting))
        indices = tuple(first + index for index in chosen)
        return FrameChoice(
            indices=indices,
            times=_times(indices, rate),
            fps=used,
            rule=self.rule,
            clamps=tuple(found),
            ignored=() if counted is None else knobs.given(_BOUNDS),
        )

    def _count(self, knobs: VideoKnobs) -> tuple[int | None, list[Clamp]]:
        """Return the number of frames that the request, or the checkpoint, asks for directly, and how the limit changed
        it."""
        asked, limit = knobs.num_frames, self.settings.max_frames
        count = self.settings.config.num_frames if asked is None and knobs.fps is None else asked
        if count is None or round(count / self.multiple) * self.multiple <= limit:
            return count, []
        used = max(limit // self.multiple, 1) * self.multiple
        if asked is None:
            return used, []
        word = knobs.word("num_frames")
        return used, [Clamp(knob=word, asked=asked, used=used, limit=limit, setting=_MAX_FRAMES_SETTING)]

    def _bounds(self, knobs: VideoKnobs, found: list[Clamp]) -> tuple[int, int, str]:
        """Return the fewest and most frames for a rate, and the setting behind the latter. Changed bounds are added to
        `found`."""
        server = (self.settings.max_frames, _MAX_FRAMES_SETTING)
        asked = at_most("max_frames", knobs.max_frames, [server], found)
        if asked is not None and asked < self.multiple:
            patch = "frames of a temporal patch"
            found.append(Clamp(knob="max_frames", asked=asked, used=self.multiple, limit=self.multiple, setting=patch))
            asked = self.multiple
        most, setting = min(server, (self.settings.config.max_frames if asked is None else asked, "max_frames"))
        least = at_most("min_frames", knobs.min_frames, [(most, setting)], found)
        return min(self.settings.config.min_frames, most) if least is None else least, most, setting


@dataclass(frozen=True, kw_only=True, slots=True)
class OnTimeGrid:
    """Chooses the frames shown at whole multiples of 1 / fps seconds from the start of the file."""

    settings: RuleSettings

    def __call__(self, times: Sequence[float], rate: float, knobs: VideoKnobs) -> FrameChoice:
        """Choose the frames on the grid.

        More frames than the limit are refused, since thinning them out would leave the grid. A part in which no
        temporal patch begins is refused, too: other patches lie outside it, and half a patch is not on the grid.
        """
        fps, start = knobs.fps or self.settings.default_fps, knobs.video_start or 0.0
        depth, limit = self.settings.patches.temporal_patch_size, self.settings.max_frames
        last = times[-1] if knobs.video_end is None else min(knobs.video_end, times[-1])
        if start > last:
            raise BadRequestError(
                f"video_start {knobs.video_start} is behind video_end, or the last frame at {times[-1]:.2f} s",
                code="invalid_value",
            )
        places = grid_places(last, fps=fps, start=start, depth=depth)
        if not places:
            end = f"video_end {knobs.video_end}" if last < times[-1] else f"the last frame at {last:.2f} s"
            raise BadRequestError(
                f"no temporal patch of the time grid begins between video_start {start} and {end}: one begins every "
                f"{depth / fps:g} s ({depth} frames at fps {fps:g}): ask for a higher fps, or a longer part",
                code="invalid_value",
            )
        found: list[Clamp] = []
        asked = at_most("max_frames", knobs.max_frames, [(limit, _MAX_FRAMES_SETTING)], found)
        most = limit if asked is None else asked
        if len(places) > most:
            raise BadRequestError(
                f"the clip has {len(places)} frames on the time grid; the limit is {most} (max_frames, "
                f"{_MAX_FRAMES_SETTING}): ask for a lower fps, or for a part by video_start and video_end",
                code="too_many_frames",
            )
        at, indices = 0, []
        for place in places:
            while at + 1 < len(times) and times[at + 1] <= place / fps + 1e-6:
                at += 1
            indices.append(at)
        return FrameChoice(
            indices=tuple(indices),
            times=tuple(place / fps for place in places),
            fps=fps,
            rule="time-grid",
            clamps=tuple(found),
        )


def _changed_rate(fps: float, used: float, wanted: float, least: int, most: tuple[int, str]) -> list[Clamp]:
    """Report how bounds changed a requested rate. `wanted`: frames at that rate. `used`: the resulting rate."""
    if wanted > most[0]:
        return [Clamp(knob="fps", asked=fps, used=used, limit=most[0], setting=most[1])]
    # one frame is the least that there is
    if max(wanted, 1) < least and used > fps:
        return [Clamp(knob="fps", asked=fps, used=used, limit=least, setting="min_frames")]
    return []


def _times(indices: Sequence[int], rate: float) -> tuple[float, ...]:
    """Return times from numbers and the average rate: references ignore the clock in the file."""
    return tuple(index / rate for index in indices)


def qwen3_vl_indices(
    total: int, rate: float, *, fps: float, num_frames: int | None, min_frames: int, max_frames: int
) -> list[int]:
    """Sample evenly from the first frame to the last, as `Qwen3VLVideoProcessor.sample_frames` of transformers does.

    A given num_frames is used unchanged. If it exceeds the clip's frames, some repeat.
    """
    if num_frames is None:
        num_frames = min(max(int(total / rate * fps), min_frames), max_frames, total)
    return np.linspace(0, total - 1, num_frames).round().astype(int).tolist()


def qwen2_vl_indices(
    total: int, rate: float, *, fps: float, num_frames: int | None, min_frames: int, max_frames: int, depth: int = 2
) -> list[int]:
    """Sample whole temporal patches, in equal steps from the first frame (transformers'
    `Qwen2VLVideoProcessor.sample_frames`).

    `depth`: frames in a temporal patch. Raises BadRequestError when the clip has fewer frames than num_frames.
    """
    if total < depth:
        return list(range(total))
    count = _whole_patches(total, num_frames, total / rate * fps, min_frames, max_frames, depth)
    import torch

    # its own float32 rounding decides about frames at whole numbers
    return torch.arange(0, total, total / count).int().tolist()[:count]


def qwen_vl_utils_indices(
    total: int, rate: float, *, fps: float, num_frames: int | None, min_frames: int, max_frames: int, depth: int = 2
) -> list[int]:
    """Sample as `smart_nframes` of qwen_vl_utils and its readers do. Raises BadRequestError as above."""
    if total < depth:
        return list(range(total))
    least = math.ceil(min_frames / depth) * depth
    count = _whole_patches(total, num_frames, total / rate * fps, least, max_frames, depth)
    import torch

    return torch.linspace(0, total - 1, count).round().long().tolist()


def grid_places(end: float, *, fps: float, start: float = 0.0, depth: int = 2) -> range:
    """Return the numbers k of the grid times k / fps, counted from the start of the file, within [start, end] seconds.

    The first is a multiple of `depth`, so that overlapping clips of one file share whole temporal patches. The range is
    empty if no temporal patch begins in it: the nearest one would show frames outside the requested part.
    """
    slack = 1e-6  # seconds in floating point: 0.3 is not 3 * 0.1
    first = math.ceil((start * fps - slack) / depth) * depth
    last = math.floor(end * fps + slack)
    return range(first, last + 1)


def frame_range(total: int, rate: float, start: float | None, end: float | None) -> tuple[int, int]:
    """Return the first frame and the number of frames of [start, end] seconds (qwen_vl_utils'
    `calculate_video_frame_range`).

    Raises BadRequestError when fewer than two frames lie in it.
    """
    if start is None and end is None:
        return 0, total
    duration = total / rate
    first = 0 if start is None else math.ceil(max(0.0, min(start, duration)) * rate)
    last = total - 1 if end is None else min(math.floor(max(0.0, min(end, duration)) * rate), total - 1)
    if first >= last:
        raise BadRequestError(
            f"video_start {start} and video_end {end} leave no two frames of a clip of {duration:.2f} s "
            f"({total} frames, {rate:.2f} a second)",
            code="invalid_value",
        )
    return first, last - first + 1


def _whole_patches(total: int, asked: int | None, by_rate: float, least: int, most: int, depth: int) -> int:
    """Return how many of `total` frames to use in whole temporal patches: `asked`, or those of the rate within the
    bounds.

    Raises BadRequestError when the clip has fewer than asked for.
    """
    if asked is None:
        most = math.floor(min(most, total) / depth) * depth
        return max(math.floor(min(max(by_rate, least), most) / depth) * depth, depth)
    count = max(round(asked / depth) * depth, depth)
    if count > total:
        rounded = "" if count == asked else f" ({asked} in whole temporal patches)"
        raise BadRequestError(
            f"{count} frames{rounded} are asked for, but the clip has only {total}", code="invalid_value"
        )
    return count
