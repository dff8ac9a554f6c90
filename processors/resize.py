"""Picture to patches: `smart_resize`, bicubic resampling and the patch order of the Qwen-VL towers.

Once normalized (`processors.normalize`), the result equals that of transformers' `Qwen2VLImageProcessor` bit for bit
(its torchvision backend). torchvision is not needed: it resizes 8-bit pictures by `torch.nn.functional.interpolate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from processors.inputs import Normalization, Resizing
from vlmserve_common.errors import BadRequestError

MAX_ASPECT_RATIO = 200
MOST_ORIGINAL_BYTES = 2**28
"""The most bytes of pixels of a picture or clip that is resized later. Larger ones are resized where they are decoded.
"""

Allocate: TypeAlias = Callable[[tuple[int, ...], Any], np.ndarray]
"""Makes the arrays that patches are written to, as `np.empty` does."""

RESAMPLING = {2: "bilinear", 3: "bicubic"}
"""Pillow's resampling numbers in preprocessor_config.json -> `interpolate` modes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchConfig:
    """How a checkpoint cuts its pictures.

    `patch_size`: pixels a side. `merge_size`: patches a side that become one token. `temporal_patch_size`: frames in a
    patch. `mean`, `std`: per channel, for pixels scaled to 0..1 by `rescale_factor`. `resample`: an `interpolate` mode.
    """

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    rescale_factor: float = 1 / 255
    resample: str = "bicubic"

    @property
    def factor(self) -> int:
        """Both sides of a resized picture are multiples of this, in pixels."""
        return self.patch_size * self.merge_size

    def row_width(self, frames: int) -> int:
        """Return the pixels in a patch of so many frames, each of 3 channels."""
        return 3 * frames * self.patch_size**2

    def normalization(self, frames: int) -> Normalization:
        """Return the normalization of patches with so many frames."""
        # Rescaling folded into mean and standard deviation, in float32: transformers does the same, in this order.
        rescale = np.float32(1.0 / self.rescale_factor)
        mean, std = ((np.asarray(part, np.float32) * rescale).tolist() for part in (self.mean, self.std))
        return Normalization(mean=tuple(mean), std=tuple(std), repeat=self.temporal_patch_size // frames)

    @property
    def resizing(self) -> Resizing:
        """The resizing of frames that the tower's device does."""
        return Resizing(mode=self.resample, patch_size=self.patch_size, merge_size=self.merge_size)

    @property
    def identity(self) -> str:
        """Every setting that turns the pixels of resized frames into patches, as text."""
        return (
            f"{self.patch_size} {self.merge_size} {self.temporal_patch_size} "
            f"{self.mean} {self.std} {self.rescale_factor!r}"
        )


def smart_resize(
    height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int, least_side: int = 0
) -> tuple[int, int]:
    """Return the size (height, width), in pixels, that a picture is resized to.

    Both sides become multiples of `factor`. The area falls into [min_pixels, max_pixels] if the sides allow it, and the
    aspect ratio changes as little as possible. The function is `smart_resize` of transformers'
    image_processing_qwen2_vl. The one of qwen_vl_utils differs only if a side is under half of `factor`, which
    `least_side`=factor evens out, or if the area limit is about one factor wide. Raises BadRequestError when one side
    is more than 200 times the other.
    """
    check_aspect_ratio(height, width)
    new_height = max(least_side, round(height / factor) * factor)
    new_width = max(least_side, round(width / factor) * factor)
    if new_height * new_width > max_pixels:
        shrink = math.sqrt((height * width) / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


def smart_resize_clip(
    num_frames: int, height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int, depth: int = 2
) -> tuple[int, int]:
    """Return the size (height, width) of a clip's resized frames. The area limits count all frames together.

    `depth`: frames in a temporal patch. The function is `smart_resize` of transformers' video_processing_qwen3_vl,
    which refuses a clip shorter than `depth`. Here such a clip counts as filled up. Raises BadRequestError as
    `smart_resize` does.
    """
    source = height, width
    if height < factor or width < factor:
        scale = max(factor / height, factor / width)
        height, width = int(height * scale), int(width * scale)
    check_aspect_ratio(height, width, source)
    num_frames = max(num_frames, depth)
    new_height = round(height / factor) * factor
    new_width = round(width / factor) * factor
    volume = round(num_frames / depth) * depth * new_height * new_width
    if volume > max_pixels:
        shrink = math.sqrt((num_frames * height * width) / max_pixels)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif volume < min_pixels:
        grow = math.sqrt(min_pixels / (num_frames * height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


def check_aspect_ratio(height: int, width: int, source: tuple[int, int] | None = None) -> None:
    """Raise BadRequestError when one side is more than 200 times the other. `source`: the original size, for the
    message."""
    ratio = max(height, width) / min(height, width)
    if ratio > MAX_ASPECT_RATIO:
        height, width = source or (height, width)
        raise BadRequestError(
            f"a picture of {width}x{height} pixels has an aspect ratio of {ratio:.1f}, the limit is {MAX_ASPECT_RATIO}",
            code="invalid_image_size",
        )


def fit_to_resize_later(frames: int, source: tuple[int, int], target: tuple[int, int]) -> bool:
    """Return True if so many frames of size `source` (height, width), which become `target`, may travel unresized.

    They must change size, and no side may shrink to less than half: then originals have at most four times the bytes of
    their patches. They must also fit MOST_ORIGINAL_BYTES.
    """
    if source == target or 3 * frames * math.prod(source) > MOST_ORIGINAL_BYTES:
        return False
    return all(side <= 2 * resized for side, resized in zip(source, target, strict=True))


def resize_frames(frames: np.ndarray, height: int, width: int, mode: str, *, in_float: bool = False) -> np.ndarray:
    """Resize uint8 [T, H, W, C] to uint8 [T, height, width, C], antialiased, rounded to whole numbers as transformers
    does.

    `in_float`: round once, not after each direction, as qwen_vl_utils does. It is slower, and sharp edges differ a
    little.
    """
    if frames.shape[1:3] == (height, width):
        return frames
    import torch

    # Channels last is the layout at hand and the fast one; the values are the same in either.
    source = torch.from_numpy(frames).permute(0, 3, 1, 2)
    if in_float:
        source = source.float()
    resized = torch.nn.functional.interpolate(
        source, size=(height, width), mode=mode, align_corners=False, antialias=True
    )
    if in_float:
        resized = resized.clamp_(0, 255).round_().byte()
    return resized.permute(0, 2, 3, 1).numpy()


def planes(frames: np.ndarray) -> np.ndarray:
    """Convert [T, H, W, C] to contiguous [T, C, H, W]. The result of `resize_frames` gives a view, any other array a
    copy."""
    return np.ascontiguousarray(frames.transpose(0, 3, 1, 2))


def frames_to_patches(
    frames: np.ndarray, config: PatchConfig, out: np.ndarray | None = None
) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Cut uint8 [T, H, W, C] into patches uint8 [t*h*w, C * depth * patch_size**2]; also return (t, h, w) in patches.

    H and W are multiples of `config.factor`. T is a multiple of temporal_patch_size, which is then the depth, or 1 for
    a picture, whose depth is 1. The order is that of `patchify` in transformers' Qwen2VLImageProcessor. Rows go by
    temporal patch, then merge windows row by row, then the patches of a window. A row goes by channel, frame, y and x.
    `out`: where to write them, contiguous.
    """
    count, height, width, channels = frames.shape
    patch, merge = config.patch_size, config.merge_size
    grid = (max(1, count // config.temporal_patch_size), height // patch, width // patch)
    depth = count // grid[0]
    if out is None:
        out = np.empty((math.prod(grid), channels * depth * patch**2), np.uint8)
    # A row of windows at a time, which the processor's cache can hold. One line of a patch is moved as one thing.
    line, rows, columns = f"V{patch}", grid[1] // merge, grid[2] // merge
    target = out.reshape(grid[0], rows, columns, merge, merge, channels, depth, patch, patch).view(line)[..., 0]
    source = planes(frames).view(line).reshape(grid[0], depth, channels, rows, merge, patch, columns, merge)
    for t in range(grid[0]):
        for row in range(rows):
            target[t, row] = source[t, :, :, row].transpose(4, 2, 5, 1, 0, 3)
    return out, grid
