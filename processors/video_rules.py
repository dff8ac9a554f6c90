"""Which frames of a clip are used, and how large: a family's rules, or one of the options that all families share.

Every area limit of a message part is of one frame (`min_pixels`, `max_pixels`, as in qwen_vl_utils) or of the whole
clip (`total_pixels`), whatever the family's own settings count. What a part says goes before what the request says
about all its videos, and that before the checkpoint; the server's limits hold for all of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

from processors.frame_sampling import (
    frame_range,
    grid_places,
    qwen2_vl_indices,
    qwen3_vl_indices,
    qwen_vl_utils_indices,
)
from processors.image_sizes import MAX_PIXELS_SETTING, Fit, aimed_size
from processors.knobs import Clamp, at_most, named
from processors.resize import PatchConfig, smart_resize, smart_resize_clip
from processors.video_options import VideoConfig, VideoDefaults, VideoKnobs
from vlmserve.common.errors import BadRequestError

_DEFAULT_FPS = 2.0
# qwen_vl_utils: tokens of a frame at least and at most, and of a clip with its temporal patches
_UTILS_MIN_TOKENS, _UTILS_MAX_TOKENS, _UTILS_TOTAL_TOKENS = 128, 768, 0.9 * 128000
_MAX_FRAMES_SETTING = "setting --max-video-frames"
_CAP = "cap_pixels_per_frame"
_NOTHING = VideoDefaults()

Limits: TypeAlias = list[tuple[int, str]]
"""Limits of one value, each with what sets it."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleSettings:
    """What rules are made from. max_frames: the server's limit. max_pixels: of a resized frame; None: the checkpoint's.

    fps, cap_pixels_per_frame: the server's, None for the checkpoint's.
    """

    config: VideoConfig
    patches: PatchConfig
    fps: float | None
    cap_pixels_per_frame: bool | None
    max_frames: int
    max_pixels: int | None


class VideoRules(ABC):
    """Stateless; knobs have been checked one by one.

    counts_clip: whether `size` of the checkpoint and the request is of a whole clip rather than of a frame.
    unused: knobs and defaults that these rules do not look at.
    """

    name: ClassVar[str] = "transformers"
    counts_clip: ClassVar[bool] = False
    unused: ClassVar[tuple[str, ...]] = ()
    default_min_pixels: int
    default_max_pixels: int
    resize_in_float = False

    def __init__(self, settings: RuleSettings) -> None:
        config = settings.config
        self.settings = settings
        self.depth = settings.patches.temporal_patch_size
        self.factor = settings.patches.factor
        self.fps = settings.fps or config.fps or _DEFAULT_FPS

    def choose(self, times: Sequence[float], rate: float, knobs: VideoKnobs) -> FrameChoice:
        """times: of the clip's frames, in seconds from the start of the file; rate: its average frames per second."""
        if knobs.do_sample_frames is not False:
            return self._choose(times, rate, knobs)
        for asked in named(knobs, ("fps", "num_frames")):
            raise BadRequestError(
                f"do_sample_frames false takes every frame of a video file, so {asked} cannot be given",
                code="invalid_value",
            )
        first, total = frame_range(len(times), rate, knobs.video_start, knobs.video_end)
        return _by_number(range(first, first + total), rate, rate, rule="all")

    def size(self, num_frames: int, height: int, width: int, knobs: VideoKnobs) -> tuple[int, int]:
        """(height, width) that the frames are resized to."""
        if knobs.resized_height is not None:
            return self._aimed(num_frames, knobs)[:2]
        return self._size(num_frames, height, width, self.limited(num_frames, knobs)[0])

    def limited(self, num_frames: int, knobs: VideoKnobs) -> tuple[VideoKnobs, tuple[Clamp, ...]]:
        """`knobs` with their areas within the server's limits, for a clip of which that many frames are used."""
        if knobs.resized_height is not None:
            return knobs, self._aimed(num_frames, knobs).clamps
        found: list[Clamp] = []
        frame, size = self._frame_limits(num_frames, knobs), self._size_limits(num_frames, knobs)
        least = at_most("min_pixels", knobs.min_pixels, frame, found)
        most = at_most("max_pixels", knobs.max_pixels, frame, found)
        low, high = ("shortest_edge", "longest_edge") if self.counts_clip else ("min_pixels", "max_pixels")
        defaults = knobs.defaults or _NOTHING
        # Where the part has its own, the request's does not count and is no news.
        shortest = at_most(low, defaults.shortest_edge, size, found if least is None else [])
        longest = at_most(high, defaults.longest_edge, size, found if most is None else [])
        defaults = replace(defaults, shortest_edge=shortest, longest_edge=longest)
        return replace(knobs, min_pixels=least, max_pixels=most, defaults=defaults), tuple(found)

    def ignored(self, knobs: VideoKnobs) -> tuple[str, ...]:
        """What was given and has no effect."""
        defaults = knobs.defaults or _NOTHING
        return (*named(knobs, self.unused), *named(defaults, self.unused), *defaults.unused)

    def _choose(self, times: Sequence[float], rate: float, knobs: VideoKnobs) -> FrameChoice:
        first, total = frame_range(len(times), rate, knobs.video_start, knobs.video_end)
        config, server, found = self.settings.config, self.settings.max_frames, list[Clamp]()
        limits = [(server, _MAX_FRAMES_SETTING)]
        num_frames = at_most("num_frames", knobs.num_frames, limits, found)
        if num_frames is None and knobs.fps is None and config.num_frames is not None:
            num_frames = min(config.num_frames, server)
        asked = at_most("max_frames", knobs.max_frames, limits, found)
        most, setting = min(limits[0], (config.max_frames if asked is None else asked, "max_frames"))
        least = at_most("min_frames", knobs.min_frames, [(most, setting)], found)
        fps = knobs.fps or self.fps
        try:
            chosen = self._indices(
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
        return _by_number((first + index for index in chosen), rate, used, rule=self.name, clamps=found)

    @abstractmethod
    def _indices(
        self, total: int, rate: float, *, fps: float, num_frames: int | None, min_frames: int, max_frames: int
    ) -> list[int]: ...

    @abstractmethod
    def _size(self, num_frames: int, height: int, width: int, knobs: VideoKnobs) -> tuple[int, int]:
        """As `size`; knobs: within the limits, without a size of their own."""

    @abstractmethod
    def _frame_limits(self, num_frames: int, knobs: VideoKnobs) -> Limits:
        """Of a frame's area."""

    def _size_limits(self, num_frames: int, knobs: VideoKnobs) -> Limits:
        """Of the area that `size` counts."""
        return self._frame_limits(num_frames, knobs)

    def _aimed(self, num_frames: int, knobs: VideoKnobs) -> Fit:
        assert knobs.resized_height is not None
        assert knobs.resized_width is not None
        limit, setting = min(self._frame_limits(num_frames, knobs))
        return aimed_size(knobs.resized_height, knobs.resized_width, factor=self.factor, limit=limit, setting=setting)

    def _capped(self, knobs: VideoKnobs) -> bool:
        """Whether cap_pixels_per_frame is on: the request's word, else the server's, else the checkpoint's."""
        asked, server = (knobs.defaults or _NOTHING).cap_pixels_per_frame, self.settings.cap_pixels_per_frame
        own = self.settings.config.cap_pixels_per_frame
        return bool(next((cap for cap in (asked, server, own) if cap is not None), False))

    def _own_area(self) -> tuple[int, int]:
        """The checkpoint's smallest and largest area, or the family's defaults."""
        config = self.settings.config
        smallest = self.default_min_pixels if config.min_pixels is None else config.min_pixels
        largest = self.default_max_pixels if config.max_pixels is None else config.max_pixels
        return smallest, max(smallest, largest)

    def _area(self, knobs: VideoKnobs, frames: int = 1) -> tuple[int, int]:
        """Smallest and largest area with what the request says; one that it names pushes the other one aside.

        frames: how many frames' areas it counts.
        """
        low, high = self._own_area()
        defaults = knobs.defaults or _NOTHING
        for least, most, times in (
            (defaults.shortest_edge, defaults.longest_edge, 1),
            (knobs.min_pixels, knobs.max_pixels, frames),
        ):
            if most is not None:
                high = most * times
                low = min(low, high)
            if least is not None:
                low = least * times
                high = max(low, high)
        return low, high

    def _within(self, height: int, width: int, knobs: VideoKnobs, low: int, high: float) -> tuple[int, int]:
        """A frame's size with an area from `low` to `high`, narrowed by what was asked for and the server allows."""
        caps = [high, knobs.max_pixels, self.settings.max_pixels]
        highest = int(min(cap for cap in caps if cap is not None))
        return smart_resize(height, width, factor=self.factor, min_pixels=min(low, highest), max_pixels=highest)


class Qwen2VideoRules(VideoRules):
    """transformers' Qwen2VLVideoProcessor (Qwen2-VL, Qwen2.5-VL). Area limits are a frame's."""

    default_min_pixels = 128 * 28 * 28
    default_max_pixels = 768 * 28 * 28

    def _indices(
        self, total: int, rate: float, *, fps: float, num_frames: int | None, min_frames: int, max_frames: int
    ) -> list[int]:
        return qwen2_vl_indices(
            total,
            rate,
            fps=fps,
            num_frames=num_frames,
            min_frames=min_frames,
            max_frames=max_frames,
            depth=self.depth,
        )

    def _size(self, num_frames: int, height: int, width: int, knobs: VideoKnobs) -> tuple[int, int]:
        smallest, largest = self._area(knobs)
        totals = [] if knobs.total_pixels is None else [knobs.total_pixels]
        if self._capped(knobs):
            totals.append(self._total_cap())
        if totals:
            largest = max(min(largest, min(totals) * self.depth // num_frames), int(smallest * 1.05))
        return self._within(height, width, knobs, smallest, largest)

    def _frame_limits(self, num_frames: int, knobs: VideoKnobs) -> Limits:
        smallest, largest = self._own_area()
        limits = [(self.settings.max_pixels or largest, MAX_PIXELS_SETTING)]
        if self._capped(knobs):
            limits.append((max(self._total_cap() * self.depth // num_frames, int(smallest * 1.05)), _CAP))
        return limits

    def _total_cap(self) -> int:
        return int((self.settings.config.max_video_tokens or 128000) * self.factor**2 * 0.9)


class Qwen3VideoRules(VideoRules):
    """transformers' Qwen3VLVideoProcessor. Area limits are a whole clip's."""

    counts_clip = True
    default_min_pixels = 128 * 32 * 32
    default_max_pixels = 768 * 32 * 32

    def _indices(
        self, total: int, rate: float, *, fps: float, num_frames: int | None, min_frames: int, max_frames: int
    ) -> list[int]:
        return qwen3_vl_indices(
            total, rate, fps=fps, num_frames=num_frames, min_frames=min_frames, max_frames=max_frames
        )

    def _size(self, num_frames: int, height: int, width: int, knobs: VideoKnobs) -> tuple[int, int]:
        count = max(num_frames, self.depth)
        smallest, largest = self._area(knobs, count)
        if self._capped(knobs):
            largest = max(min(self._frame_cap(), largest // num_frames), int(self._floor(knobs) * 1.05)) * num_frames
        for cap in (knobs.max_pixels, self.settings.max_pixels):
            largest = largest if cap is None else min(largest, cap * count)
        largest = largest if knobs.total_pixels is None else min(largest, knobs.total_pixels)
        return smart_resize_clip(
            num_frames,
            height,
            width,
            factor=self.factor,
            min_pixels=min(smallest, largest),
            max_pixels=largest,
            depth=self.depth,
        )

    def _frame_limits(self, num_frames: int, knobs: VideoKnobs) -> Limits:
        count = max(num_frames, self.depth)
        limits = [(self.settings.max_pixels or max(1, self._own_area()[1] // count), MAX_PIXELS_SETTING)]
        if self._capped(knobs):
            limits.append((max(self._frame_cap(), int(self._floor(knobs) * 1.05)), _CAP))
        return limits

    def _size_limits(self, num_frames: int, knobs: VideoKnobs) -> Limits:
        cap = self.settings.max_pixels
        return [(cap * max(num_frames, self.depth) if cap else self._own_area()[1], MAX_PIXELS_SETTING)]

    def _frame_cap(self) -> int:
        return (self.settings.config.max_video_tokens or 768) * self.factor**2

    def _floor(self, knobs: VideoKnobs) -> int:
        """The reference counts a clip's smallest area for each frame here."""
        asked = (knobs.defaults or _NOTHING).shortest_edge
        return self._own_area()[0] if asked is None else asked


class QwenVLUtilsRules(VideoRules):
    """What qwen_vl_utils' `fetch_video` does, for every family."""

    name = "qwen-vl-utils"
    unused = (_CAP,)
    resize_in_float = True

    def _indices(
        self, total: int, rate: float, *, fps: float, num_frames: int | None, min_frames: int, max_frames: int
    ) -> list[int]:
        return qwen_vl_utils_indices(
            total,
            rate,
            fps=fps,
            num_frames=num_frames,
            min_frames=min_frames,
            max_frames=max_frames,
            depth=self.depth,
        )

    def _own_area(self) -> tuple[int, int]:
        return _UTILS_MIN_TOKENS * self.factor**2, _UTILS_MAX_TOKENS * self.factor**2

    def _size(self, num_frames: int, height: int, width: int, knobs: VideoKnobs) -> tuple[int, int]:
        token = self.factor**2
        least, largest = self._area(knobs)
        total = _UTILS_TOTAL_TOKENS * token if knobs.total_pixels is None else knobs.total_pixels
        most = max(min(largest, total / num_frames * self.depth), int(least * 1.05))
        return self._within(height, width, knobs, least, most)

    def _frame_limits(self, num_frames: int, knobs: VideoKnobs) -> Limits:
        limits = [(self._own_area()[1], f"--video-sampling {self.name}")]
        if self.settings.max_pixels is not None:
            limits.append((self.settings.max_pixels, MAX_PIXELS_SETTING))
        return limits


class TimeGridRules(VideoRules):
    """Frames at whole multiples of 1 / fps seconds from the start of the file: at each, the frame shown then.

    A frame's size depends on the file alone, not on how many frames are used, so two clips of one file (by
    video_start and video_end) have their common frames, and temporal patches, bit for bit in common.
    """

    name = "time-grid"
    unused = ("num_frames", "min_frames", "total_pixels", _CAP)

    def _choose(self, times: Sequence[float], rate: float, knobs: VideoKnobs) -> FrameChoice:
        """See above. More frames than the limit are refused: thinned out they would leave the grid."""
        fps = knobs.fps or self.fps
        last = times[-1] if knobs.video_end is None else min(knobs.video_end, times[-1])
        if (knobs.video_start or 0.0) > last:
            raise BadRequestError(
                f"video_start {knobs.video_start} is behind video_end, or the last frame at {times[-1]:.2f} s",
                code="invalid_value",
            )
        places = grid_places(last, fps=fps, start=knobs.video_start or 0.0, depth=self.depth)
        most = min(self.settings.max_frames, knobs.max_frames or self.settings.max_frames)
        _check_grid(len(places), most)
        at, indices = 0, []
        for place in places:
            while at + 1 < len(times) and times[at + 1] <= place / fps + 1e-6:
                at += 1
            indices.append(at)
        return FrameChoice(
            indices=tuple(indices), times=tuple(place / fps for place in places), fps=fps, rule=self.name
        )

    def _indices(
        self, total: int, rate: float, *, fps: float, num_frames: int | None, min_frames: int, max_frames: int
    ) -> list[int]:
        raise NotImplementedError("frames are chosen by time")

    def _own_area(self) -> tuple[int, int]:
        return 4 * self.factor**2, _UTILS_MAX_TOKENS * self.factor**2

    def _size(self, num_frames: int, height: int, width: int, knobs: VideoKnobs) -> tuple[int, int]:
        return self._within(height, width, knobs, *self._area(knobs))

    def _frame_limits(self, num_frames: int, knobs: VideoKnobs) -> Limits:
        return [(self.settings.max_pixels or self._own_area()[1], MAX_PIXELS_SETTING)]


def _by_number(
    indices: Iterable[int], rate: float, fps: float, *, rule: str, clamps: Iterable[Clamp] = ()
) -> FrameChoice:
    """References go by number and average rate, not by the clock in the file."""
    chosen = tuple(indices)
    return FrameChoice(
        indices=chosen, times=tuple(index / rate for index in chosen), fps=fps, rule=rule, clamps=tuple(clamps)
    )


def _check_grid(count: int, most: int) -> None:
    if count > most:
        raise BadRequestError(
            f"the clip has {count} frames on the time grid; the limit is {most} (max_frames, setting "
            "--max-video-frames): ask for a lower fps, or for a part by video_start and video_end",
            code="too_many_frames",
        )
