"""How large the frames of a clip become: each rule's area limits, and what those of the server change of a request's.

Every area limit of a message part is of one frame (`min_pixels`, `max_pixels`, as in qwen_vl_utils) or of the whole
clip (`total_pixels`), whatever the family's own settings count. What a part says goes before what the request says
about all its videos, and that before the checkpoint; the server's limits hold for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, TypeAlias

from processors.image.sizes import MAX_PIXELS_SETTING
from processors.knobs import Clamp, at_most
from processors.resize import smart_resize, smart_resize_clip
from processors.video.options import VideoDefaults, VideoKnobs

CAP = "cap_pixels_per_frame"
_NOTHING = VideoDefaults()

Limit: TypeAlias = tuple[int, str]
"""An area in pixels, and what sets it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Areas:
    """What all sizers go by. Areas are in pixels.

    factor: pixels a side of a token. depth: frames in a temporal patch. low, high: the smallest and largest area where
    nothing is asked. server: the server's limit of a frame's area; None: `high` is the limit. max_frames: the server's
    limit of a clip's frames.
    """

    factor: int
    depth: int
    low: int
    high: int
    server: int | None
    max_frames: int

    def limit(self, frames: int = 1) -> Limit:
        """Of an area of so many frames, where `high` is of as many."""
        return self.server * frames if self.server else self.high, MAX_PIXELS_SETTING

    def asked(self, knobs: VideoKnobs, frames: int = 1) -> tuple[int, int]:
        """Smallest and largest area with what the request says; one that it names pushes the other one aside.

        frames: how many frames' areas it counts.
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

    def share(self, total: int, num_frames: int) -> int:
        """A frame's of a whole clip's area; the frames of a temporal patch count as one."""
        return total * self.depth // num_frames

    def of_clip(self, limit: Limit) -> Limit:
        """Of the whole area of any clip, with that limit of a frame's (see `share`)."""
        return -(-limit[0] * self.max_frames // self.depth), limit[1]

    def fit(self, height: int, width: int, knobs: VideoKnobs, low: int, high: int) -> tuple[int, int]:
        """A frame's size with an area from `low` to `high`, narrowed by what was asked for and the server allows."""
        highest = min(cap for cap in (high, knobs.max_pixels, self.server) if cap is not None)
        return smart_resize(height, width, factor=self.factor, min_pixels=min(low, highest), max_pixels=highest)


class FrameSizer(Protocol):
    """Stateless. counts_clip: whether `size` of checkpoint and request is a whole clip's area rather than a frame's."""

    counts_clip: ClassVar[bool]

    @property
    def areas(self) -> Areas: ...

    def size(self, num_frames: int, height: int, width: int, knobs: VideoKnobs) -> tuple[int, int]:
        """(height, width) that frames are resized to; knobs: within the limits, without a size of their own."""

    def limit(self, num_frames: int, knobs: VideoKnobs) -> Limit:
        """Of a frame's area, in a clip of which that many frames are used."""

    def total_limit(self, knobs: VideoKnobs) -> Limit | None:
        """Of the area of a whole clip, however many frames it has; None where nothing counts it."""


def limit_areas(sizer: FrameSizer, num_frames: int, knobs: VideoKnobs) -> tuple[VideoKnobs, tuple[Clamp, ...]]:
    """`knobs` with their areas within the sizer's limits, for a clip of which that many frames are used."""
    found: list[Clamp] = []
    limit, areas = sizer.limit(num_frames, knobs), sizer.areas
    least = at_most("min_pixels", knobs.min_pixels, [limit], found)
    most = at_most("max_pixels", knobs.max_pixels, [limit], found)
    total, total_limit = knobs.total_pixels, sizer.total_limit(knobs)
    if total_limit is not None:
        total = at_most("total_pixels", total, [total_limit], found)
    low, high = ("shortest_edge", "longest_edge") if sizer.counts_clip else ("min_pixels", "max_pixels")
    size_limit = areas.limit(max(num_frames, areas.depth)) if sizer.counts_clip else limit
    defaults = knobs.defaults or _NOTHING
    # Where the part has its own, the request's does not count and is no news.
    shortest = at_most(low, defaults.shortest_edge, [size_limit], found if least is None else [])
    longest = at_most(high, defaults.longest_edge, [size_limit], found if most is None else [])
    defaults = replace(defaults, shortest_edge=shortest, longest_edge=longest)
    return replace(knobs, min_pixels=least, max_pixels=most, total_pixels=total, defaults=defaults), tuple(found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen2Sizes:
    """transformers' Qwen2VLVideoProcessor (Qwen2-VL, Qwen2.5-VL).

    capped: whether cap_pixels_per_frame is on where a request does not say; clip_cap: what it leaves a clip.
    """

    counts_clip: ClassVar[bool] = False
    areas: Areas
    capped: bool
    clip_cap: int

    def size(self, num_frames: int, height: int, width: int, knobs: VideoKnobs) -> tuple[int, int]:
        low, high = self.areas.asked(knobs)
        totals = [] if knobs.total_pixels is None else [knobs.total_pixels]
        if _capped(knobs, self.capped):
            totals.append(self.clip_cap)
        if totals:
            high = max(min(high, self.areas.share(min(totals), num_frames)), _least_cap(low))
        return self.areas.fit(height, width, knobs, low, high)

    def limit(self, num_frames: int, knobs: VideoKnobs) -> Limit:
        limit = self.areas.limit()
        if _capped(knobs, self.capped):
            cap = max(self.areas.share(self.clip_cap, num_frames), _least_cap(self.areas.low))
            limit = min(limit, (cap, CAP))
        return limit

    def total_limit(self, knobs: VideoKnobs) -> Limit:
        limit = self.areas.of_clip(self.areas.limit())
        return min(limit, (self.clip_cap, CAP)) if _capped(knobs, self.capped) else limit


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen3Sizes:
    """transformers' Qwen3VLVideoProcessor. capped: as in `Qwen2Sizes`; frame_cap: what the cap leaves a frame."""

    counts_clip: ClassVar[bool] = True
    areas: Areas
    capped: bool
    frame_cap: int

    def size(self, num_frames: int, height: int, width: int, knobs: VideoKnobs) -> tuple[int, int]:
        areas = self.areas
        count = max(num_frames, areas.depth)
        low, high = areas.asked(knobs, count)
        if _capped(knobs, self.capped):
            high = max(min(self.frame_cap, high // num_frames), self._least_cap(knobs)) * num_frames
        for cap in (knobs.max_pixels, areas.server):
            high = high if cap is None else min(high, cap * count)
        high = high if knobs.total_pixels is None else min(high, knobs.total_pixels)
        return smart_resize_clip(
            num_frames,
            height,
            width,
            factor=areas.factor,
            min_pixels=min(low, high),
            max_pixels=high,
            depth=areas.depth,
        )

    def limit(self, num_frames: int, knobs: VideoKnobs) -> Limit:
        areas = self.areas
        limit = areas.server or max(1, areas.high // max(num_frames, areas.depth)), MAX_PIXELS_SETTING
        if _capped(knobs, self.capped):
            limit = min(limit, (max(self.frame_cap, self._least_cap(knobs)), CAP))
        return limit

    def total_limit(self, knobs: VideoKnobs) -> Limit:
        areas = self.areas
        limit = areas.limit(areas.max_frames)
        if _capped(knobs, self.capped):
            limit = min(limit, (max(self.frame_cap, self._least_cap(knobs)) * areas.max_frames, CAP))
        return limit

    def _least_cap(self, knobs: VideoKnobs) -> int:
        """The reference counts a clip's smallest area for each frame here."""
        asked = (knobs.defaults or _NOTHING).shortest_edge
        return _least_cap(self.areas.low if asked is None else asked)


@dataclass(frozen=True, kw_only=True, slots=True)
class QwenVLUtilsSizes:
    """`fetch_video` of qwen_vl_utils. total_pixels: of a clip where a request does not say. setting: what chose it."""

    counts_clip: ClassVar[bool] = False
    areas: Areas
    total_pixels: int
    setting: str

    def size(self, num_frames: int, height: int, width: int, knobs: VideoKnobs) -> tuple[int, int]:
        low, high = self.areas.asked(knobs)
        total = self.total_pixels if knobs.total_pixels is None else knobs.total_pixels
        high = max(min(high, self.areas.share(total, num_frames)), _least_cap(low))
        return self.areas.fit(height, width, knobs, low, high)

    def limit(self, num_frames: int, knobs: VideoKnobs) -> Limit:
        """Its own, which the server can only lower."""
        limit = self.areas.high, self.setting
        if self.areas.server is not None:
            limit = min(limit, (self.areas.server, MAX_PIXELS_SETTING))
        return limit

    def total_limit(self, knobs: VideoKnobs) -> Limit:
        return self.areas.of_clip(self.limit(self.areas.max_frames, knobs))


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeGridSizes:
    """A frame's size depends on the file alone, not on how many frames are used."""

    counts_clip: ClassVar[bool] = False
    areas: Areas

    def size(self, num_frames: int, height: int, width: int, knobs: VideoKnobs) -> tuple[int, int]:
        return self.areas.fit(height, width, knobs, *self.areas.asked(knobs))

    def limit(self, num_frames: int, knobs: VideoKnobs) -> Limit:
        return self.areas.limit()

    def total_limit(self, knobs: VideoKnobs) -> None:
        return None


def _capped(knobs: VideoKnobs, otherwise: bool) -> bool:
    """Whether cap_pixels_per_frame is on."""
    asked = (knobs.defaults or _NOTHING).cap_pixels_per_frame
    return otherwise if asked is None else asked


def _least_cap(low: int) -> int:
    """References leave a little room above the smallest area, whatever the cap."""
    return int(low * 1.05)
