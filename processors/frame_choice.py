"""Which frames of a clip are used: by number as a reference does, every one, or by time on a grid.

What a request says goes before the checkpoint; the server's limit holds for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from processors.frame_sampling import frame_range, grid_places
from processors.knobs import Clamp, at_most, named
from processors.video_options import VideoConfig, VideoKnobs
from vlmserve.common.errors import BadRequestError

_MAX_FRAMES_SETTING = "setting --max-video-frames"


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameChoice:
    """indices: frames of the clip, ascending. times: of each, in seconds. fps: frames used per second of the clip.

    rule: the rule's name. clamps: what limits changed of the knobs; ignored: knobs without effect.
    """

    indices: tuple[int, ...]
    times: tuple[float, ...]
    fps: float
    rule: str
    clamps: tuple[Clamp, ...] = ()
    ignored: tuple[str, ...] = ()


class Sampler(Protocol):
    """A reference's rule, of `processors.frame_sampling`."""

    def __call__(
        self, total: int, rate: float, *, fps: float, num_frames: int | None, min_frames: int, max_frames: int
    ) -> list[int]: ...


FrameChooser: TypeAlias = Callable[[Sequence[float], float, VideoKnobs], FrameChoice]
"""times of the clip's frames, in seconds from the start of the file; its average frames per second; checked knobs."""


def every_frame(times: Sequence[float], rate: float, knobs: VideoKnobs) -> FrameChoice:
    """What do_sample_frames false asks for. Raises BadRequestError when the request also says how many."""
    for asked in named(knobs, ("fps", "num_frames")):
        raise BadRequestError(
            f"do_sample_frames false takes every frame of a video file, so {asked} cannot be given",
            code="invalid_value",
        )
    first, total = frame_range(len(times), rate, knobs.video_start, knobs.video_end)
    return _by_number(range(first, first + total), rate, rate, rule="all")


@dataclass(frozen=True, kw_only=True, slots=True)
class ByNumber:
    """rule: its name. fps: frames a second where a request does not say. max_frames: the server's limit."""

    rule: str
    sample: Sampler
    config: VideoConfig
    fps: float
    max_frames: int

    def __call__(self, times: Sequence[float], rate: float, knobs: VideoKnobs) -> FrameChoice:
        """Those that `sample` takes. Raises BadRequestError when the clip has too few for it."""
        first, total = frame_range(len(times), rate, knobs.video_start, knobs.video_end)
        config, server, found = self.config, self.max_frames, list[Clamp]()
        limits = [(server, _MAX_FRAMES_SETTING)]
        num_frames = at_most("num_frames", knobs.num_frames, limits, found)
        if num_frames is None and knobs.fps is None and config.num_frames is not None:
            num_frames = min(config.num_frames, server)
        asked = at_most("max_frames", knobs.max_frames, limits, found)
        most, setting = min(limits[0], (config.max_frames if asked is None else asked, "max_frames"))
        least = at_most("min_frames", knobs.min_frames, [(most, setting)], found)
        fps = knobs.fps or self.fps
        try:
            chosen = self.sample(
                total,
                rate,
                fps=fps,
                num_frames=num_frames,
                min_frames=min(config.min_frames, most) if least is None else least,
                max_frames=most,
            )
        except BadRequestError as error:
            raise BadRequestError("; ".join([error.message, *map(str, found)]), code=error.code) from None
        used = len(chosen) / total * rate
        if knobs.fps is not None and most < min(total, total / rate * fps):
            found.append(Clamp(knob="fps", asked=fps, used=used, limit=most, setting=setting))
        return _by_number((first + index for index in chosen), rate, used, rule=self.rule, clamps=found)


@dataclass(frozen=True, kw_only=True, slots=True)
class OnTimeGrid:
    """Frames at whole multiples of 1 / fps seconds from the start of the file: at each, the frame shown then.

    fps, max_frames: as in `ByNumber`. depth: frames in a temporal patch.
    """

    fps: float
    depth: int
    max_frames: int

    def __call__(self, times: Sequence[float], rate: float, knobs: VideoKnobs) -> FrameChoice:
        """See above. More frames than the limit are refused: thinned out they would leave the grid. So are parts in
        which no temporal patch begins: another one's frames are outside of them, and half of one is none of the grid's.
        """
        fps, start = knobs.fps or self.fps, knobs.video_start or 0.0
        last = times[-1] if knobs.video_end is None else min(knobs.video_end, times[-1])
        if start > last:
            raise BadRequestError(
                f"video_start {knobs.video_start} is behind video_end, or the last frame at {times[-1]:.2f} s",
                code="invalid_value",
            )
        places = grid_places(last, fps=fps, start=start, depth=self.depth)
        if not places:
            end = f"video_end {knobs.video_end}" if last < times[-1] else f"the last frame at {last:.2f} s"
            raise BadRequestError(
                f"no temporal patch of the time grid begins between video_start {start} and {end}: one begins every "
                f"{self.depth / fps:g} s ({self.depth} frames at fps {fps:g}): ask for a higher fps, or a longer part",
                code="invalid_value",
            )
        most = min(self.max_frames, knobs.max_frames or self.max_frames)
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
            indices=tuple(indices), times=tuple(place / fps for place in places), fps=fps, rule="time-grid"
        )


def _by_number(
    indices: Iterable[int], rate: float, fps: float, *, rule: str, clamps: Iterable[Clamp] = ()
) -> FrameChoice:
    """References go by number and average rate, not by the clock in the file."""
    chosen = tuple(indices)
    return FrameChoice(
        indices=chosen, times=tuple(index / rate for index in chosen), fps=fps, rule=rule, clamps=tuple(clamps)
    )
