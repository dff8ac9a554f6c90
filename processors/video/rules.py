"""Which frames of a clip are used, and how large: a family's rules, or one of the options that all families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from processors.image.sizes import Fit, aimed_size
from processors.knobs import areas_without_effect, named
from processors.resize import PatchConfig
from processors.video.frame_choice import (
    ByNumber,
    FrameChoice,
    FrameChooser,
    OnTimeGrid,
    Sampler,
    every_frame,
    qwen2_vl_indices,
    qwen3_vl_indices,
    qwen_vl_utils_indices,
)
from processors.video.frame_sizes import (
    CAP,
    Areas,
    FrameSizer,
    Qwen2Sizes,
    Qwen3Sizes,
    QwenVLUtilsSizes,
    TimeGridSizes,
    limit_areas,
)
from processors.video.options import Sampling, VideoConfig, VideoDefaults, VideoKnobs

_DEFAULT_FPS = 2.0
# Tokens of a frame at least and at most, of all references; of a clip with its temporal patches, of qwen_vl_utils
_MIN_TOKENS, _MAX_TOKENS, _TOTAL_TOKENS = 128, 768, 115200


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoRules:
    """Stateless; knobs have been checked one by one.

    unused: knobs and defaults that neither looks at. resize_in_float: whether frames are resized as floats.
    """

    chooser: FrameChooser
    sizer: FrameSizer
    unused: tuple[str, ...] = ()
    resize_in_float: bool = False

    def choose(self, times: Sequence[float], rate: float, knobs: VideoKnobs) -> FrameChoice:
        """times: of the clip's frames, in seconds from the start of the file; rate: its average frames per second."""
        chooser = every_frame if knobs.do_sample_frames is False else self.chooser
        return chooser(times, rate, knobs)

    def fit(self, num_frames: int, height: int, width: int, knobs: VideoKnobs) -> Fit:
        """The size of frames of that size, for a clip of which that many are used. Raises BadRequestError."""
        if knobs.resized_height is not None and knobs.resized_width is not None:
            limit, setting = self.sizer.limit(num_frames, knobs)
            return aimed_size(
                knobs.resized_height,
                knobs.resized_width,
                factor=self.sizer.areas.factor,
                limit=limit,
                setting=setting,
            )
        limited, clamps = limit_areas(self.sizer, num_frames, knobs)
        return Fit(*self.sizer.size(num_frames, height, width, limited), clamps)

    def ignored(self, knobs: VideoKnobs) -> tuple[str, ...]:
        """What was given and has no effect."""
        defaults = knobs.defaults or VideoDefaults()
        given = (*knobs.given(self.unused), *areas_without_effect(knobs), *named(defaults, self.unused))
        return tuple(dict.fromkeys((*given, *defaults.unused)))


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

    @property
    def default_fps(self) -> float:
        """Frames a second where a request does not say."""
        return self.fps or self.config.fps or _DEFAULT_FPS

    @property
    def capped(self) -> bool:
        """Whether cap_pixels_per_frame is on where a request does not say."""
        server = self.cap_pixels_per_frame
        return bool(self.config.cap_pixels_per_frame if server is None else server)


def qwen2_rules(settings: RuleSettings) -> VideoRules:
    """As transformers' Qwen2VLVideoProcessor (Qwen2-VL, Qwen2.5-VL)."""
    token, tokens = settings.patches.factor**2, settings.config.max_video_tokens or 128000
    sizer = Qwen2Sizes(
        areas=_checkpoint_areas(settings, 28 * 28), capped=settings.capped, clip_cap=int(tokens * token * 0.9)
    )
    sample = partial(qwen2_vl_indices, depth=settings.patches.temporal_patch_size)
    return VideoRules(chooser=_by_number(settings, sample, whole_patches=True), sizer=sizer)


def qwen3_rules(settings: RuleSettings) -> VideoRules:
    """As transformers' Qwen3VLVideoProcessor."""
    token, tokens = settings.patches.factor**2, settings.config.max_video_tokens or 768
    sizer = Qwen3Sizes(areas=_checkpoint_areas(settings, 32 * 32), capped=settings.capped, frame_cap=tokens * token)
    return VideoRules(chooser=_by_number(settings, qwen3_vl_indices, whole_patches=False), sizer=sizer)


def qwen_vl_utils_rules(settings: RuleSettings) -> VideoRules:
    """As qwen_vl_utils' `fetch_video`, for every family."""
    rule, token = "qwen-vl-utils", settings.patches.factor**2
    sizer = QwenVLUtilsSizes(
        areas=_areas(settings, _MIN_TOKENS * token, _MAX_TOKENS * token),
        total_pixels=_TOTAL_TOKENS * token,
        setting=f"--video-sampling {rule}",
    )
    sample = partial(qwen_vl_utils_indices, depth=settings.patches.temporal_patch_size)
    chooser = _by_number(settings, sample, rule, whole_patches=True)
    return VideoRules(chooser=chooser, sizer=sizer, unused=(CAP,), resize_in_float=True)


def time_grid_rules(settings: RuleSettings) -> VideoRules:
    """For every family: two clips of one file (by video_start and video_end) have their common frames, and temporal
    patches, bit for bit in common.
    """
    token = settings.patches.factor**2
    chooser = OnTimeGrid(
        fps=settings.default_fps, depth=settings.patches.temporal_patch_size, max_frames=settings.max_frames
    )
    return VideoRules(
        chooser=chooser,
        sizer=TimeGridSizes(areas=_areas(settings, 4 * token, _MAX_TOKENS * token)),
        unused=("num_frames", "min_frames", "total_pixels", CAP),
    )


SHARED_RULES: Mapping[Sampling, Callable[[RuleSettings], VideoRules]] = {
    "qwen-vl-utils": qwen_vl_utils_rules,
    "time-grid": time_grid_rules,
}
"""What `--video-sampling` puts in the place of a family's own."""


def _by_number(settings: RuleSettings, sample: Sampler, rule: str = "transformers", *, whole_patches: bool) -> ByNumber:
    return ByNumber(
        rule=rule,
        sample=sample,
        config=settings.config,
        fps=settings.default_fps,
        max_frames=settings.max_frames,
        multiple=settings.patches.temporal_patch_size if whole_patches else 1,
    )


def _checkpoint_areas(settings: RuleSettings, token: int) -> Areas:
    """The checkpoint's smallest and largest area, or the family's defaults. token: its area in those, in pixels."""
    config = settings.config
    low = _MIN_TOKENS * token if config.min_pixels is None else config.min_pixels
    high = _MAX_TOKENS * token if config.max_pixels is None else config.max_pixels
    return _areas(settings, low, max(low, high))


def _areas(settings: RuleSettings, low: int, high: int) -> Areas:
    patches = settings.patches
    return Areas(
        factor=patches.factor,
        depth=patches.temporal_patch_size,
        low=low,
        high=high,
        server=settings.max_pixels,
        max_frames=settings.max_frames,
    )
