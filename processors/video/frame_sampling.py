"""Which frames of a clip are used: each reference's own rule, in plain numbers.

All take the clip's number of frames and rate (frames per second), and give indices in ascending order. Where a
reference cannot serve a clip of one frame (it divides by zero, or finds an empty range), that frame is used.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from vlmserve_common.errors import BadRequestError

_CODE = "invalid_value"


def qwen3_vl_indices(
    total: int, rate: float, *, fps: float, num_frames: int | None, min_frames: int, max_frames: int
) -> list[int]:
    """`Qwen3VLVideoProcessor.sample_frames` of transformers: evenly from the first frame to the last.

    num_frames, when given, is taken as it is, and beyond the clip's frames repeats some.
    """
    if num_frames is None:
        num_frames = min(max(int(total / rate * fps), min_frames), max_frames, total)
    return np.linspace(0, total - 1, num_frames).round().astype(int).tolist()


def qwen2_vl_indices(
    total: int, rate: float, *, fps: float, num_frames: int | None, min_frames: int, max_frames: int, depth: int = 2
) -> list[int]:
    """`Qwen2VLVideoProcessor.sample_frames` of transformers: whole temporal patches, in equal steps from the first.

    depth: frames in a temporal patch. Raises BadRequestError when the clip has fewer frames than num_frames.
    """
    if total < depth:
        return list(range(total))
    count = _whole_patches(total, num_frames, total / rate * fps, min_frames, max_frames, depth)
    # torch's own float32 rounding decides about frames at whole numbers
    return torch.arange(0, total, total / count).int().tolist()[:count]


def qwen_vl_utils_indices(
    total: int, rate: float, *, fps: float, num_frames: int | None, min_frames: int, max_frames: int, depth: int = 2
) -> list[int]:
    """`smart_nframes` of qwen_vl_utils and the even spacing of its readers. Raises BadRequestError as above."""
    if total < depth:
        return list(range(total))
    least = math.ceil(min_frames / depth) * depth
    count = _whole_patches(total, num_frames, total / rate * fps, least, max_frames, depth)
    return torch.linspace(0, total - 1, count).round().long().tolist()


def grid_places(end: float, *, fps: float, start: float = 0.0, depth: int = 2) -> range:
    """Numbers k of the grid times k / fps, counted from the start of the file, within [start, end] seconds.

    The first is a multiple of `depth`, so that clips of one file that overlap share whole temporal patches. None where
    no temporal patch begins in there: the nearest one would show what was not asked for.
    """
    slack = 1e-6  # seconds in floating point: 0.3 is not 3 * 0.1
    first = math.ceil((start * fps - slack) / depth) * depth
    last = math.floor(end * fps + slack)
    return range(first, last + 1)


def frame_range(total: int, rate: float, start: float | None, end: float | None) -> tuple[int, int]:
    """First frame and number of frames of [start, end] seconds (`calculate_video_frame_range` of qwen_vl_utils).

    Raises BadRequestError when fewer than two frames lie in there.
    """
    if start is None and end is None:
        return 0, total
    duration = total / rate
    first = 0 if start is None else math.ceil(max(0.0, min(start, duration)) * rate)
    last = total - 1 if end is None else min(math.floor(max(0.0, min(end, duration)) * rate), total - 1)
    if first >= last:
        raise BadRequestError(
            f"video_start {start} and video_end {end} leave no two frames of a clip of {duration:.2f} s "
            f"({total} frames, {rate:.2f} a second)",
            code=_CODE,
        )
    return first, last - first + 1


def _whole_patches(total: int, asked: int | None, by_rate: float, least: int, most: int, depth: int) -> int:
    """How many of `total` frames fill whole temporal patches: `asked`, or those of the rate within the bounds.

    Raises BadRequestError when the clip has fewer than asked for.
    """
    if asked is None:
        most = math.floor(min(most, total) / depth) * depth
        return max(math.floor(min(max(by_rate, least), most) / depth) * depth, depth)
    count = max(round(asked / depth) * depth, depth)
    if count > total:
        rounded = "" if count == asked else f" ({asked} in whole temporal patches)"
        raise BadRequestError(f"{count} frames{rounded} are asked for, but the clip has only {total}", code=_CODE)
    return count
