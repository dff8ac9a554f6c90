"""Which frames of a clip are used, and how large: a family's rules, or one of the options that all families share.

Every area limit of a request is of one frame (`min_pixels`, `max_pixels`, as in qwen_vl_utils) or of the whole clip
(`total_pixels`), whatever the family's own settings count.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from processors.frame_sampling import (
    frame_range,
    grid_places,
    qwen2_vl_indices,
    qwen3_vl_indices,
    qwen_vl_utils_indices,
)
from processors.resize import PatchConfig, smart_resize, smart_resize_clip
from processors.video_options import VideoConfig, VideoKnobs
from vlmserve.common.errors import BadRequestError

_DEFAULT_FPS = 2.0
# qwen_vl_utils: tokens of a frame at least and at most, and of a clip with its temporal patches
_UTILS_MIN_TOKENS, _UTILS_MAX_TOKENS, _UTILS_TOTAL_TOKENS = 128, 768, 0.9 * 128000


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameChoice:
    """indices: frames of the clip, ascending. times: of each, in seconds. fps: frames used per second of the clip."""

    indices: tuple[int, ...]
    times: tuple[float, ...]
    fps: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleSettings:
    """What rules are made from. max_frames: the server's limit. max_pixels: of a resized frame, None for no limit.

    fps, cap_pixels_per_frame: the server's, None for the checkpoint's.
    """

    config: VideoConfig
    patches: PatchConfig
    fps: float | None
    cap_pixels_per_frame: bool | None
    max_frames: int
    max_pixels: int | None


class VideoRules(ABC):
    """Stateless; knobs have been checked one by one."""

    default_min_pixels: int
    default_max_pixels: int
    resize_in_float = False

    def __init__(self, settings: RuleSettings) -> None:
        config = settings.config
        self.settings = settings
        self.depth = settings.patches.temporal_patch_size
        self.factor = settings.patches.factor
        self.fps = settings.fps or config.fps or _DEFAULT_FPS
        cap = settings.cap_pixels_per_frame
        self.cap = bool(config.cap_pixels_per_frame if cap is None else cap)

    def choose(self, times: Sequence[float], rate: float, knobs: VideoKnobs) -> FrameChoice:
        """times: of the clip's frames, in seconds from the start of the file; rate: its average frames per second."""
        first, total = frame_range(len(times), rate, knobs.video_start, knobs.video_end)
        config = self.settings.config
        num_frames = knobs.num_frames
        if num_frames is None and knobs.fps is None:
            num_frames = config.num_frames
        most = min(config.max_frames if knobs.max_frames is None else knobs.max_frames, self.settings.max_frames)
        least = config.min_frames if knobs.min_frames is None else knobs.min_frames
        fps = knobs.fps or self.fps
        chosen = self._indices(
            total, rate, fps=fps, num_frames=num_frames, min_frames=min(least, most), max_frames=most
        )
        indices = tuple(first + index for index in chosen)
        # References go by number and average rate, not by the clock in the file.
        return FrameChoice(indices=indices, times=tuple(i / rate for i in indices), fps=len(indices) / total * rate)

    def size(self, num_frames: int, height: int, width: int, knobs: VideoKnobs) -> tuple[int, int]:
        """(height, width) that the frames are resized to."""
        if knobs.resized_height is not None and knobs.resized_width is not None:
            height, width = knobs.resized_height, knobs.resized_width
        return self._size(num_frames, height, width, knobs)

    @abstractmethod
    def _indices(
        self, total: int, rate: float, *, fps: float, num_frames: int | None, min_frames: int, max_frames: int
    ) -> list[int]: ...

    @abstractmethod
    def _size(self, num_frames: int, height: int, width: int, knobs: VideoKnobs) -> tuple[int, int]: ...

    def _limits(self) -> tuple[int, int]:
        """The checkpoint's smallest and largest area, or the family's defaults."""
        config = self.settings.config
        smallest = self.default_min_pixels if config.min_pixels is None else config.min_pixels
        largest = self.default_max_pixels if config.max_pixels is None else config.max_pixels
        return smallest, max(smallest, largest)

    def _frame_size(self, height: int, width: int, knobs: VideoKnobs, least: int, most: float) -> tuple[int, int]:
        """Each frame within an area, narrowed by what was asked for and what the server allows."""
        caps = [most, knobs.max_pixels, self.settings.max_pixels]
        highest = int(min(cap for cap in caps if cap is not None))
        lowest = least if knobs.min_pixels is None else knobs.min_pixels
        return smart_resize(height, width, factor=self.factor, min_pixels=min(lowest, highest), max_pixels=highest)


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
        smallest, largest = self._limits()
        totals = [] if knobs.total_pixels is None else [knobs.total_pixels]
        if self.cap:
            tokens = self.settings.config.max_video_tokens or 128000
            totals.append(int(tokens * self.factor**2 * 0.9))
        if totals:
            largest = max(min(largest, min(totals) * self.depth // num_frames), int(smallest * 1.05))
        return self._frame_size(height, width, knobs, smallest, largest)


class Qwen3VideoRules(VideoRules):
    """transformers' Qwen3VLVideoProcessor. Area limits are a whole clip's."""

    default_min_pixels = 128 * 32 * 32
    default_max_pixels = 768 * 32 * 32

    def _indices(
        self, total: int, rate: float, *, fps: float, num_frames: int | None, min_frames: int, max_frames: int
    ) -> list[int]:
        return qwen3_vl_indices(
            total, rate, fps=fps, num_frames=num_frames, min_frames=min_frames, max_frames=max_frames
        )

    def _size(self, num_frames: int, height: int, width: int, knobs: VideoKnobs) -> tuple[int, int]:
        smallest, largest = self._limits()
        if self.cap:
            frame_cap = (self.settings.config.max_video_tokens or 768) * self.factor**2
            largest = max(min(frame_cap, largest // num_frames), int(smallest * 1.05)) * num_frames
        count = max(num_frames, self.depth)
        for cap in (knobs.max_pixels, self.settings.max_pixels):
            largest = largest if cap is None else min(largest, cap * count)
        largest = largest if knobs.total_pixels is None else min(largest, knobs.total_pixels)
        smallest = smallest if knobs.min_pixels is None else knobs.min_pixels * count
        return smart_resize_clip(
            num_frames,
            height,
            width,
            factor=self.factor,
            min_pixels=min(smallest, largest),
            max_pixels=largest,
            depth=self.depth,
        )


class QwenVLUtilsRules(VideoRules):
    """What qwen_vl_utils' `fetch_video` does, for every family."""

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

    def _size(self, num_frames: int, height: int, width: int, knobs: VideoKnobs) -> tuple[int, int]:
        token = self.factor**2
        least = _UTILS_MIN_TOKENS * token if knobs.min_pixels is None else knobs.min_pixels
        total = _UTILS_TOTAL_TOKENS * token if knobs.total_pixels is None else knobs.total_pixels
        most = max(min(_UTILS_MAX_TOKENS * token, total / num_frames * self.depth), int(least * 1.05))
        return self._frame_size(height, width, knobs, least, most)


class TimeGridRules(VideoRules):
    """Frames at whole multiples of 1 / fps seconds from the start of the file: at each, the frame shown then.

    A frame's size depends on the file alone, not on how many frames are used, so two clips of one file (by
    video_start and video_end) have their common frames, and temporal patches, bit for bit in common.
    """

    def choose(self, times: Sequence[float], rate: float, knobs: VideoKnobs) -> FrameChoice:
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
        return FrameChoice(indices=tuple(indices), times=tuple(place / fps for place in places), fps=fps)

    def _indices(
        self, total: int, rate: float, *, fps: float, num_frames: int | None, min_frames: int, max_frames: int
    ) -> list[int]:
        raise NotImplementedError("frames are chosen by time")

    def _size(self, num_frames: int, height: int, width: int, knobs: VideoKnobs) -> tuple[int, int]:
        token = self.factor**2
        return self._frame_size(height, width, knobs, 4 * token, _UTILS_MAX_TOKENS * token)


def _check_grid(count: int, most: int) -> None:
    if count > most:
        raise BadRequestError(
            f"the clip has {count} frames on the time grid; the limit is {most} (max_frames, setting "
            "--max-video-frames): ask for a lower fps, or for a part by video_start and video_end",
            code="too_many_frames",
        )
