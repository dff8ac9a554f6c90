"""Video options of the server's settings, of a checkpoint and of one request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from processors.knobs import LARGEST, check_consistent, check_count, check_flag, check_number, named, shown
from processors.pruning import MOST_PRUNING
from vlmserve_common.compute.cpus import available_cpus
from vlmserve_common.errors import BadRequestError

if TYPE_CHECKING:
    from processors.resize import PatchConfig  # which needs torch

Sampling = Literal["transformers", "qwen-vl-utils", "time-grid"]
Reference = Literal["published", "transformers"]


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoLimits:
    """Server limits of videos.

    `max_duration_s`: seconds of the longest clip. `max_frames`: most frames used of one clip. `max_frame_pixels`: the
    largest frame (width * height) of a file. `max_tokens`: most pad tokens of one clip, None for no limit.
    `max_decode_s`: seconds to decode one clip. `decode_threads`: most threads that decode one clip.
    """

    max_duration_s: float = 7200.0
    max_frames: int = 768
    max_frame_pixels: int = 4096 * 4096
    max_tokens: int | None = None
    max_decode_s: float = 300.0
    decode_threads: int = field(default_factory=lambda: min(4, available_cpus()))


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoOptions:
    """Server options of videos.

    `sampling`: the rule that chooses frames and their size. `fps`: frames per second unless a request gives them; None
    for the checkpoint's, else 2. `cap_pixels_per_frame`: overrides the checkpoint's field of that name. `reference`:
    the choice where published code and transformers 5.10+ disagree.

    With "published", a Qwen3-VL video's timestamps replace the template's vision markers, and text after a Qwen2-VL or
    Qwen2.5-VL video starts at the largest position plus one. With "transformers", the markers stay around them, and
    text starts at the larger of height and width.
    """

    sampling: Sampling = "transformers"
    fps: float | None = None
    cap_pixels_per_frame: bool | None = None
    reference: Reference = "published"


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoConfig:
    """A checkpoint's video processor, as transformers reads it; None for a value that it does not give.

    `min_pixels`, `max_pixels`: `size`, the area of a frame (Qwen2-VL, Qwen2.5-VL) or of a whole clip (Qwen3-VL).
    `max_video_tokens`: used by `cap_pixels_per_frame`.
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
class VideoDefaults:
    """A request's values in place of a checkpoint's video settings; None keeps the checkpoint's.

    `shortest_edge`, `longest_edge`: `size`. As in the checkpoint it is the area of a frame (Qwen2-VL, Qwen2.5-VL) or of
    a whole clip (Qwen3-VL). `unused`: names of values that mean nothing to the family's videos.
    """

    shortest_edge: int | None = None
    longest_edge: int | None = None
    cap_pixels_per_frame: bool | None = None
    unused: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Focus:
    """What sampling by a question goes by.

    `question`: its text. `nearness`: a frame's number and how near it is to the question, a cosine, for each frame of
    the first pass; empty before that, and of a clip whose frames are all used. `failure`: why there is none.
    """

    question: str
    nearness: tuple[tuple[int, float], ...] = ()
    failure: str = ""

    @property
    def may_do(self) -> bool:
        """Whether another try may succeed where this one has failed."""
        return bool(self.question and self.failure)


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoKnobs:
    """A request's wishes for one video (the fields of Qwen's message parts); None keeps the default.

    `fps` or `num_frames`, not both. `count_word`: the request's name for num_frames, None for Qwen's "nframes".
    `min_frames`, `max_frames`: bounds of the number that fps gives. `min_pixels`, `max_pixels`: area of a resized
    frame. `total_pixels`: area of the whole clip. `resized_height`, `resized_width`: a frame's size, rounded to whole
    tokens; it replaces all areas. `video_start`, `video_end`: the part to use, in seconds. `do_sample_frames`: False
    uses every frame. `defaults`: the request's values for all its videos. A list of frames is always used whole, and
    fps is the rate at which its frames were taken. `skip_repeats`: leave exact repeats out. `video_pruning_rate`: the
    share of its tokens that leaves by EVS's measure; see `processors.pruning`. `sampling`: "adaptive" for more frames
    where more changes, "question" for more of them near to `focus`; see `processors.video.adaptive`. `h264_frames`: the
    list holds the access units of an H.264 stream in place of pictures, and these are the numbers of those that are
    used.
    `use_audio_in_video`: the model hears the clip, too.
    """

    fps: int | float | None = None
    num_frames: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    total_pixels: int | None = None
    resized_height: int | None = None
    resized_width: int | None = None
    video_start: int | float | None = None
    video_end: int | float | None = None
    do_sample_frames: bool | None = None
    skip_repeats: bool | None = None
    video_pruning_rate: int | float | None = None
    sampling: str | None = None
    count_word: str | None = None
    use_audio_in_video: bool | None = None
    defaults: VideoDefaults | None = None
    h264_frames: tuple[int, ...] | None = None
    focus: Focus | None = None

    def word(self, name: str) -> str:
        """Return the request's name for a field."""
        return self.count_word or "nframes" if name == "num_frames" else name

    def given(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the request's names for the fields that have a value."""
        return tuple(map(self.word, named(self, names)))


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleSettings:
    """Settings that rules are made from.

    `max_frames`: the server's limit. `max_pixels`: of a resized frame; None for the checkpoint's. `fps`,
    `cap_pixels_per_frame`: the server's, None for the checkpoint's. `tell_max_pixels`: see `ProcessorLimits`.
    """

    config: VideoConfig
    patches: PatchConfig
    fps: float | None
    cap_pixels_per_frame: bool | None
    max_frames: int
    max_pixels: int | None
    tell_max_pixels: bool = False

    @property
    def default_fps(self) -> float:
        """Frames per second unless a request gives them."""
        return self.fps or self.config.fps or 2.0

    @property
    def capped(self) -> bool:
        """Whether cap_pixels_per_frame is on unless a request sets it."""
        server = self.cap_pixels_per_frame
        return bool(self.config.cap_pixels_per_frame if server is None else server)


# Beyond these, times and positions that are counted from it leave what integers and texts can hold.
_LEAST_FPS, _MOST_FPS = 1e-5, 1e5


def check_knobs(knobs: VideoKnobs) -> None:
    """Raise BadRequestError for the first value that no clip can be processed with."""
    num_frames = knobs.word("num_frames")
    check_count(num_frames, knobs.num_frames)
    areas = ("min_pixels", "max_pixels", "total_pixels", "resized_height", "resized_width")
    for name in ("min_frames", "max_frames", *areas):
        check_count(name, getattr(knobs, name))
    check_number("fps", knobs.fps, "a number", least=_LEAST_FPS, most=_MOST_FPS)
    check_flag("skip_repeats", knobs.skip_repeats)
    check_number("video_pruning_rate", knobs.video_pruning_rate, "a share", least=0, most=MOST_PRUNING)
    for name in ("video_start", "video_end"):
        check_number(name, getattr(knobs, name), "a number of seconds", least=0, most=LARGEST)
    if knobs.sampling not in (None, "adaptive", "question"):
        what = f'sampling is {shown(knobs.sampling)}; it must be "adaptive" or "question"'
        raise BadRequestError(what, code="invalid_value")
    if knobs.sampling and knobs.do_sample_frames is False:
        raise BadRequestError("sampling and do_sample_frames false exclude each other", code="invalid_value")
    if knobs.fps is not None and knobs.num_frames is not None:
        raise BadRequestError(f"fps and {num_frames} exclude each other", code="invalid_value")
    check_consistent(knobs)
