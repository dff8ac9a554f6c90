"""What can be said about videos: by the server's settings, by a checkpoint and by one request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Sampling = Literal["transformers", "qwen-vl-utils", "time-grid"]
Reference = Literal["published", "transformers"]


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoLimits:
    """max_duration_s: seconds of the longest clip. max_frames: most frames used of one clip.

    max_frame_pixels: the largest frame (width * height) of a file. max_tokens: most pad tokens of one clip, None for no
    limit. decode_threads: threads that decode one clip.
    """

    max_duration_s: float = 7200.0
    max_frames: int = 768
    max_frame_pixels: int = 4096 * 4096
    max_tokens: int | None = None
    decode_threads: int = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoOptions:
    """sampling: whose rule chooses frames and their size. fps: frames a second where a request does not say; None: the
    checkpoint's, else 2. cap_pixels_per_frame: overrules the checkpoint's field of that name.

    reference: where published code and transformers 5.10+ disagree. "published": a Qwen3-VL video's timestamps take the
    place of the template's vision markers, and text after a Qwen2-VL or Qwen2.5-VL video starts at the largest position
    plus one. "transformers": the markers stay around them, and text starts at the larger of height and width.
    """

    sampling: Sampling = "transformers"
    fps: float | None = None
    cap_pixels_per_frame: bool | None = None
    reference: Reference = "published"


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoConfig:
    """A checkpoint's video processor, as transformers reads it; None where it is silent.

    min_pixels, max_pixels: `size`, the area of a frame (Qwen2-VL, Qwen2.5-VL) or of a whole clip (Qwen3-VL).
    max_video_tokens: what `cap_pixels_per_frame` counts with.
    """

    fps: float | None = None
    num_frames: int | None = None
    min_frames: int = 4
    max_frames: int = 768
    min_pixels: int | None = None
    max_pixels: int | None = None
    cap_pixels_per_frame: bool | None = None
    max_video_tokens: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoKnobs:
    """What a request says about one video (the fields of Qwen's message parts); None keeps the default.

    fps or num_frames (their nframes), not both; min_frames, max_frames: bounds where fps counts. min_pixels and
    max_pixels: area of a resized frame; total_pixels: of the whole clip. resized_height, resized_width: a size to aim
    at. video_start, video_end: the part to use, in seconds. For a list of frames, fps is the rate they were taken at.
    """

    fps: float | None = None
    num_frames: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    total_pixels: int | None = None
    resized_height: int | None = None
    resized_width: int | None = None
    video_start: float | None = None
    video_end: float | None = None
