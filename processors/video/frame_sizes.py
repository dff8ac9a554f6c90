"""Computes the size of a clip's frames by each rule's area limits, and how server limits change a request's.

An area limit of a message part counts one frame (`min_pixels`, `max_pixels`, as in qwen_vl_utils) or the whole clip
(`total_pixels`), whatever the family's own settings count. A part's values win over the request's for all videos, which
win over the checkpoint's. The server's limits apply to all three.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

from processors.image.sizes import MAX_PIXELS_SETTING
from processors.knobs import Clamp, at_most
from processors.resize import smart_resize, smart_resize_clip
from processors.video.options import RuleSettings, VideoDefaults, VideoKnobs

CAP = "cap_pixels_per_frame"
_NOTHING = VideoDefaults()

Limit: TypeAlias = tuple[int, str]
"""An area in pixels, and the setting that gives it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameSizer:
    """Sizes of the time grid: a frame's size depends on the file alone, not on how many frames are used. References
    extend it.

    `low`, `high`: the smallest and largest area in pixels, unless a request asks for others. `counts_clip`: True if
    these, and `size` of checkpoint and request, count a whole clip instead of a frame.
    """

    settings: RuleSettings
    low: int
    high: int
    counts_clip: ClassVar[bool] = False

    def size(self, num_frames: int, height: int, width: int, knobs: VideoKnobs) -> tuple[int, int]:
        """Return the (height, width) of resized frames. `knobs`: within the limits, without a size of their own."""
        low, high = self._asked(knobs)
        total = self._total(knobs)
        if total is not None:  # the frames of a temporal patch count as one
            high = max(min(high, self._share(total, num_frames)), _least_cap(low))
        highest = min(cap for cap in (high, knobs.max_pixels, self.settings.max_pixels) if cap is not None)
        factor = self.settings.patches.factor
        return smart_resize(height, width, factor=factor, min_pixels=min(low, highest), max_pixels=highest)

    def limit(self, num_frames: int, knobs: VideoKnobs) -> Limit:
        """Return the limit of a frame's area, in a clip with so many frames used."""
        return self.server_limit()

    def total_limit(self, knobs: VideoKnobs) -> Limit | None:
        """Return the limit of a clip's whole area, for any number of frames; None if total_pixels has no effect."""
        return None

    def server_limit(self, frames: int = 1) -> Limit:
        """Return the server's limit on the area of so many frames. `high` must count as many."""
        server = self.settings.max_pixels
        return server * frames if server else self.high, MAX_PIXELS_SETTING

    def _total(self, knobs: VideoKnobs) -> int | None:
        """Return the area that a clip's frames share; None if they share none."""
        return None

    def _share(self, total: int, num_frames: int) -> int:
        return total * self.settings.patches.temporal_patch_size // num_frames

    def _of_clip(self, limit: Limit) -> Limit:
        """Return the limit of any clip's whole area that follows from a frame's limit (see `_share`)."""
        return -(-limit[0] * self.settings.max_frames // self.settings.patches.temporal_patch_size), limit[1]

    def _asked(self, knobs: VideoKnobs, frames: int = 1) -> tuple[int, int]:
        """Return the smallest and largest area after the request's values. One that it names pushes the other one
        aside.

        `frames`: how many frames' areas these count.
        """
        low, high = self.low, self.high
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

    def _capped(self, knobs: VideoKnobs) -> bool:
        """Return True if cap_pixels_per_frame is on."""
        asked = (knobs.defaults or _NOTHING).cap_pixels_per_frame
        return self.settings.capped if asked is None else asked


def limit_areas(sizer: FrameSizer, num_frames: int, knobs: VideoKnobs) -> tuple[VideoKnobs, tuple[Clamp, ...]]:
    """Return `knobs` with areas within the sizer's limits, for a clip with so many frames used."""
    found: list[Clamp] = []
    limit = sizer.limit(num_frames, knobs)
    least = at_most("min_pixels", knobs.min_pixels, [limit], found)
    most = at_most("max_pixels", knobs.max_pixels, [limit], found)
    total, total_limit = knobs.total_pixels, sizer.total_limit(knobs)
    if total_limit is not None:
        total = at_most("total_pixels", total, [total_limit], found)
    low, high = ("shortest_edge", "longest_edge") if sizer.counts_clip else ("min_pixels", "max_pixels")
    depth = sizer.settings.patches.temporal_patch_size
    size_limit = sizer.server_limit(max(num_frames, depth)) if sizer.counts_clip else limit
    defaults = knobs.defaults or _NOTHING
    # A part's own value hides the request's, so a change of that is not reported.
    shortest = at_most(low, defaults.shortest_edge, [size_limit], found if least is None else [])
    longest = at_most(high, defaults.longest_edge, [size_limit], found if most is None else [])
    defaults = replace(defaults, shortest_edge=shortest, longest_edge=longest)
    return replace(knobs, min_pixels=least, max_pixels=most, total_pixels=total, defaults=defaults), tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen2Sizes(FrameSizer):
    """transformers' Qwen2VLVideoProcessor (Qwen2-VL, Qwen2.5-VL). `cap`: a clip's largest area under
    cap_pixels_per_frame."""

    cap: int

    def limit(self, num_frames: int, knobs: VideoKnobs) -> Limit:
        limit = self.server_limit()
        if self._capped(knobs):
            limit = min(limit, (max(self._share(self.cap, num_frames), _least_cap(self.low)), CAP))
        return limit

    def total_limit(self, knobs: VideoKnobs) -> Limit:
        limit = self._of_clip(self.server_limit())
        return min(limit, (self.cap, CAP)) if self._capped(knobs) else limit

    def _total(self, knobs: VideoKnobs) -> int | None:
        totals = (knobs.total_pixels, self.cap if self._capped(knobs) else None)
        return min((total for total in totals if total is not None), default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3Sizes(FrameSizer):
    """transformers' Qwen3VLVideoProcessor. `cap`: a frame's largest area under cap_pixels_per_frame."""

    counts_clip: ClassVar[bool] = True
    cap: int

    def size(self, num_frames: int, height: int, width: int, knobs: VideoKnobs) -> tuple[int, int]:
        patches = self.settings.patches
        count = max(num_frames, patches.temporal_patch_size)
        low, high = self._asked(knobs, count)
        if self._capped(knobs):
            high = max(min(self.cap, high // num_frames), self._least_cap(knobs)) * num_frames
        caps = [cap * count for cap in (knobs.max_pixels, self.settings.max_pixels) if cap is not None]
        high = min([high, *caps] if knobs.total_pixels is None else [high, *caps, knobs.total_pixels])
        return smart_resize_clip(
            num_frames,
            height,
            width,
            factor=patches.factor,
            min_pixels=min(low, high),
            max_pixels=high,
            depth=patches.temporal_patch_size,
        )

    def limit(self, num_frames: int, knobs: VideoKnobs) -> Limit:
        count = max(num_frames, self.settings.patches.temporal_patch_size)
        limit = self.settings.max_pixels or max(1, self.high // count), MAX_PIXELS_SETTING
        return min(limit, self._frame_cap(knobs)) if self._capped(knobs) else limit

    def total_limit(self, knobs: VideoKnobs) -> Limit:
        frames = self.settings.max_frames
        limit, (cap, setting) = self.server_limit(frames), self._frame_cap(knobs)
        return min(limit, (cap * frames, setting)) if self._capped(knobs) else limit

    def _frame_cap(self, knobs: VideoKnobs) -> Limit:
        return max(self.cap, self._least_cap(knobs)), CAP

    def _least_cap(self, knobs: VideoKnobs) -> int:
        """Return the least cap. The reference counts a clip's smallest area for each frame here."""
        asked = (knobs.defaults or _NOTHING).shortest_edge
        return _least_cap(self.low if asked is None else asked)


@dataclass(frozen=True, kw_only=True, slots=True)
class QwenVLUtilsSizes(FrameSizer):
    """`fetch_video` of qwen_vl_utils. `total_pixels`: a clip's area, unless a request gives one. `setting`: the setting
    that chose this rule."""

    total_pixels: int
    setting: str

    def limit(self, num_frames: int, knobs: VideoKnobs) -> Limit:
        """Return the rule's own limit, which the server can only lower."""
        return min((self.high, self.setting), self.server_limit())

    def total_limit(self, knobs: VideoKnobs) -> Limit:
        return self._of_clip(self.limit(self.settings.max_frames, knobs))

    def _total(self, knobs: VideoKnobs) -> int:
        return self.total_pixels if knobs.total_pixels is None else knobs.total_pixels


def _least_cap(low: int) -> int:
    """Return the least cap of an area: references leave a little room above the smallest area."""
    return int(low * 1.05)
