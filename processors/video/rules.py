"""Rules for the frames of a clip and their size: a family's own, or one that all families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from processors.image.sizes import FittedSize, aimed_size, told_scaling
from processors.knobs import areas_without_effect, named
from processors.video.frame_choice import (
    ByNumber,
    FrameChoice,
    FrameChooser,
    OnTimeGrid,
    every_frame,
    qwen2_vl_indices,
    qwen3_vl_indices,
    qwen_vl_utils_indices,
)
from processors.video.frame_sizes import (
    CAP,
    FrameSizer,
    Qwen2Sizes,
    Qwen3Sizes,
    QwenVLUtilsSizes,
    limit_areas,
)
from processors.video.options import RuleSettings, Sampling, VideoConfig, VideoDefaults, VideoKnobs

# Tokens of a frame at least and at most, of all references; of a clip with its temporal patches, of qwen_vl_utils
MIN_TOKENS, MAX_TOKENS, _TOTAL_TOKENS = 128, 768, 115200


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoRules:
    """How frames are chosen and sized. Stateless. Knobs have been checked one by one.

    `unused`: knobs and defaults that have no effect. `resize_in_float`: True if frames are resized as floats.
    """

    chooser: FrameChooser
    sizer: FrameSizer
    unused: tuple[str, ...] = ()
    resize_in_float: bool = False

    def choose(self, times: Sequence[float], rate: float, knobs: VideoKnobs) -> FrameChoice:
        """Choose frames. `times`: seconds of the clip's frames from the start of the file. `rate`: its average frames
        per second."""
        return (every_frame if knobs.do_sample_frames is False else self.chooser)(times, rate, knobs)

    def fit(self, num_frames: int, height: int, width: int, knobs: VideoKnobs) -> FittedSize:
        """Return the size of resized frames of height x width, for a clip with so many used. Raises BadRequestError."""
        if knobs.resized_height is not None and knobs.resized_width is not None:
            limit, setting = self.sizer.limit(num_frames, knobs)
            return aimed_size(
                knobs.resized_height,
                knobs.resized_width,
                factor=self.sizer.settings.patches.factor,
                limit=limit,
                setting=setting,
            )
        limited, clamps = limit_areas(self.sizer, num_frames, knobs)
        size = self.sizer.size(num_frames, height, width, limited)
        settings = self.sizer.settings
        if settings.tell_max_pixels and settings.max_pixels is not None and not clamps:
            free = replace(self.sizer, settings=replace(settings, max_pixels=None))
            clamps = told_scaling(free.size(num_frames, height, width, limited), size, settings.max_pixels)
        return FittedSize(*size, clamps)

    def ignored(self, knobs: VideoKnobs) -> tuple[str, ...]:
        """Return the names of values that were given and have no effect."""
        defaults = knobs.defaults or VideoDefaults()
        given = (*knobs.given(self.unused), *areas_without_effect(knobs), *named(defaults, self.unused))
        return tuple(dict.fromkeys((*given, *defaults.unused)))


def qwen2_rules(settings: RuleSettings) -> VideoRules:
    """Make the rules of transformers' Qwen2VLVideoProcessor (Qwen2-VL, Qwen2.5-VL)."""
    tokens, depth = settings.config.max_video_tokens or 128000, settings.patches.temporal_patch_size
    low, high = _checkpoint_areas(settings.config, 28 * 28)
    cap = int(tokens * settings.patches.factor**2 * 0.9)
    return VideoRules(
        chooser=ByNumber(settings=settings, sample=partial(qwen2_vl_indices, depth=depth), multiple=depth),
        sizer=Qwen2Sizes(settings=settings, low=low, high=high, cap=cap),
    )


def qwen3_rules(settings: RuleSettings) -> VideoRules:
    """Make the rules of transformers' Qwen3VLVideoProcessor."""
    low, high = _checkpoint_areas(settings.config, 32 * 32)
    cap = (settings.config.max_video_tokens or 768) * settings.patches.factor**2
    return VideoRules(
        chooser=ByNumber(settings=settings, sample=qwen3_vl_indices),
        sizer=Qwen3Sizes(settings=settings, low=low, high=high, cap=cap),
    )


def qwen_vl_utils_rules(settings: RuleSettings) -> VideoRules:
    """Make the rules of qwen_vl_utils' `fetch_video`, for every family."""
    rule, token, depth = "qwen-vl-utils", settings.patches.factor**2, settings.patches.temporal_patch_size
    sample = partial(qwen_vl_utils_indices, depth=depth)
    sizer = QwenVLUtilsSizes(
        settings=settings,
        low=MIN_TOKENS * token,
        high=MAX_TOKENS * token,
        total_pixels=_TOTAL_TOKENS * token,
        setting=f"--video-sampling {rule}",
    )
    chooser = ByNumber(settings=settings, sample=sample, rule=rule, multiple=depth)
    return VideoRules(chooser=chooser, sizer=sizer, unused=(CAP,), resize_in_float=True)


def time_grid_rules(settings: RuleSettings) -> VideoRules:
    """Make the rules of the time grid, for every family.

    Two clips of one file (by video_start and video_end) have their common frames and temporal patches in common, bit
    for bit.
    """
    token = settings.patches.factor**2
    return VideoRules(
        chooser=OnTimeGrid(settings=settings),
        sizer=FrameSizer(settings=settings, low=4 * token, high=MAX_TOKENS * token),
        unused=("num_frames", "min_frames", "total_pixels", CAP),
    )


SHARED_RULES: Mapping[Sampling, Callable[[RuleSettings], VideoRules]] = {
    "qwen-vl-utils": qwen_vl_utils_rules,
    "time-grid": time_grid_rules,
}
"""Rules of `--video-sampling` that replace a family's own."""


def _checkpoint_areas(config: VideoConfig, token: int) -> tuple[int, int]:
    """Return the checkpoint's smallest and largest area, or the family's defaults. `token`: pixels of a token in the
    defaults."""
    low = MIN_TOKENS * token if config.min_pixels is None else config.min_pixels
    high = MAX_TOKENS * token if config.max_pixels is None else config.max_pixels
    return low, max(low, high)
