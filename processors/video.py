"""One clip, or list of frames, to patches.

Frames are resized and cut into patches one temporal patch after the other, so that memory holds the result and two
frames of full size, not the clip.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, repeat

import numpy as np

from processors.ahead import ahead
from processors.frame_choice import FrameChoice
from processors.hashing import media_digest, patch_digest
from processors.inputs import Modality
from processors.knobs import named
from processors.processed import ProcessedVideo
from processors.resize import Allocate, PatchConfig, frames_to_patches, planes, resize_frames
from processors.video_options import VideoKnobs, VideoLimits, check_knobs
from processors.video_rules import VideoRules
from vlmserve.common.errors import BadRequestError

_CODE = "invalid_value"
# qwen_vl_utils' rate of frames that come as a list, where nothing is said
_LIST_FPS = 2.0
_OF_FILES = ("num_frames", "min_frames", "max_frames", "do_sample_frames", "video_start", "video_end")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Source:
    """A clip or list of frames as it came. size: (width, height), upright. fps: frames a second."""

    size: tuple[int, int]
    fps: float
    num_frames: int


class VideoProcessor:
    """Clips of one checkpoint. Stateless, so any number of threads may use it."""

    def __init__(
        self, rules: VideoRules, patches: PatchConfig, limits: VideoLimits, allocate: Allocate = np.empty
    ) -> None:
        self.limits = limits
        self._allocate = allocate
        self._rules = rules
        self._patches = patches

    def process_clip(self, data: bytes, knobs: VideoKnobs) -> ProcessedVideo:
        """A video file's bytes. Raises BadRequestError."""
        check_knobs(knobs)
        # Only who gets a video needs PyAV.
        clip = importlib.import_module("processors.video_decoding").Clip(data, self.limits)
        info = clip.info
        choice = self._rules.choose(info.times, info.rate, knobs)
        source = _Source(size=(info.width, info.height), fps=info.rate, num_frames=info.num_frames)
        with contextlib.closing(ahead(clip.read(choice.indices))) as frames:
            return self._process(frames, choice, source, knobs)

    def process_frames(self, frames: Iterator[np.ndarray], count: int, knobs: VideoKnobs) -> ProcessedVideo:
        """`count` RGB frames uint8 [H, W, 3], all used, taken `knobs.fps` a second. Raises BadRequestError."""
        check_knobs(knobs)
        if not count:
            raise BadRequestError("the video is an empty list of frames", code=_CODE)
        if count > self.limits.max_frames:
            raise _too_many("the list of frames has", count, self.limits)
        first = next(frames)
        fps = knobs.fps or _LIST_FPS
        choice = FrameChoice(
            indices=tuple(range(count)),
            times=tuple(i / fps for i in range(count)),
            fps=fps,
            rule="list",
            ignored=named(knobs, _OF_FILES),
        )
        height, width = first.shape[:2]
        source = _Source(size=(width, height), fps=fps, num_frames=count)
        return self._process(chain([first], _of_size(frames, height, width)), choice, source, knobs)

    def _process(
        self, frames: Iterable[np.ndarray], choice: FrameChoice, source: _Source, knobs: VideoKnobs
    ) -> ProcessedVideo:
        depth, factor = self._patches.temporal_patch_size, self._patches.factor
        count = len(choice.indices)
        if count > self.limits.max_frames:
            raise _too_many("the request asks for", count, self.limits)
        height, width, clamps = self._rules.fit(count, source.size[1], source.size[0], knobs)
        t = math.ceil(count / depth)
        num_tokens = t * (height // factor) * (width // factor)
        limit = self.limits.max_tokens
        if limit is not None and num_tokens >= limit:
            raise BadRequestError(
                f"the video takes {num_tokens} tokens ({count} frames of {width}x{height} pixels), the context has "
                f"{limit} (setting --max-model-len): ask for less by fps, max_frames, max_pixels or total_pixels",
                code="context_length_exceeded",
            )
        grid, feature, digests = self._cut(frames, t, height, width)
        times = [*choice.times, *repeat(choice.times[-1], t * depth - count)]
        return ProcessedVideo(
            digest=media_digest(Modality.VIDEO, grid, digests),
            patch_digests=digests,
            grid_thw=grid,
            feature=feature,
            num_tokens=num_tokens,
            source_size=source.size,
            frame_indices=choice.indices,
            frame_times=choice.times,
            # `_calculate_timestamps` of transformers' Qwen3VLProcessor
            patch_times=tuple((times[i] + times[i + depth - 1]) / 2 for i in range(0, len(times), depth)),
            second_per_grid_t=depth / choice.fps,
            source_fps=source.fps,
            source_frames=source.num_frames,
            sampling=choice.rule,
            sample_fps=choice.fps,
            clamps=choice.clamps + clamps,
            ignored=choice.ignored + self._rules.ignored(knobs),
        )

    def _cut(
        self, frames: Iterable[np.ndarray], t: int, height: int, width: int
    ) -> tuple[tuple[int, int, int], np.ndarray, tuple[bytes, ...]]:
        """Grid, read-only feature and digests of t temporal patches; the last frame is repeated to fill the last
        one."""
        config = self._patches
        depth, patch = config.temporal_patch_size, config.patch_size
        grid = (t, height // patch, width // patch)
        feature = self._allocate((t, grid[1] * grid[2], config.patch_elements), np.float32)
        group = np.empty((depth, 3, height, width), np.uint8)
        digests: list[bytes] = []
        resized = self._resized(frames, height, width)
        for place in range(t):
            for at in range(depth):
                # a filled up frame stays as it is from the place before
                group[at] = next(resized, group[at - 1])
            frames_to_patches(group.transpose(0, 2, 3, 1), config, out=feature[place])
            digests.append(patch_digest(grid[1:], group, config))
        rows = feature.reshape(-1, feature.shape[-1])
        rows.flags.writeable = False
        return grid, rows, tuple(digests)

    def _resized(self, frames: Iterable[np.ndarray], height: int, width: int) -> Iterator[np.ndarray]:
        """uint8 [3, height, width] each."""
        in_float = self._rules.resize_in_float
        for frame in frames:
            yield planes(resize_frames(frame[None], height, width, self._patches.resample, in_float=in_float))[0]


def _of_size(frames: Iterable[np.ndarray], height: int, width: int) -> Iterator[np.ndarray]:
    """The frames behind the first one of a list, which must have its size."""
    for place, frame in enumerate(frames, 1):
        if frame.shape[:2] != (height, width):
            raise BadRequestError(
                f"frame {place} of the list has {frame.shape[1]}x{frame.shape[0]} pixels, the first one "
                f"{width}x{height}: all frames of a video must have one size",
                code="invalid_video",
            )
        yield frame


def _too_many(what: str, count: int, limits: VideoLimits) -> BadRequestError:
    return BadRequestError(
        f"{what} {count} frames; the limit is {limits.max_frames} (setting --max-video-frames)", code="too_many_frames"
    )
