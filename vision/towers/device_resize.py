"""Resizes decoded frames to patches on the tower's device, with the same bits as `processors.resize` on the CPU.

On the CPU torch resizes 8-bit pictures in whole numbers, along the width first, then along the height. Weights are
rounded to 16 bits. Each output is a sum of products, rounded and clamped to 8 bits. Such sums are the same in any order
and on any device. Weights are made on the host in float64, as torch makes them (`HelperInterpBase` of ATen's
UpSampleKernel.cpp). Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from processors.inputs import Resizing
from vlmserve_common.compute.transfers import transfers_for

_MOST_SUMS = 1 << 23
"""Outputs that are computed together. Each takes 9 bytes of scratch memory."""


def original_patches(frames: torch.Tensor, grid: tuple[int, int], how: Resizing) -> torch.Tensor:
    """Resize and cut n temporal patches uint8 [n, depth, H, W, 3] to uint8 [n * h * w, 3 * depth * patch_size**2].

    `grid`: (h, w). The order is that of `processors.resize.frames_to_patches`.
    """
    patch, merge = how.patch_size, how.merge_size
    count, depth, *_ = frames.shape
    resized = resize(frames.flatten(0, 1), grid[0] * patch, grid[1] * patch, how.mode)
    split = resized.view(count, depth, grid[0] // merge, merge, patch, grid[1] // merge, merge, patch, 3)
    return split.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(count * grid[0] * grid[1], -1)


def resize(frames: torch.Tensor, height: int, width: int, mode: str) -> torch.Tensor:
    """Resize uint8 [n, H, W, C] to uint8 [n, height, width, C], bit for bit as `processors.resize.resize_frames` on the
    CPU.

    `mode`: one of `processors.resize.RESAMPLING`.
    """
    count, source_height, source_width, channels = frames.shape
    axes = [make_taps(source_width, width, mode), make_taps(source_height, height, mode)]
    along_width, along_height = transfers_for(frames.device).upload([axis.table for axis in axes])
    lines = frames.reshape(count * source_height, source_width, channels)
    if source_width != width:
        lines = _resample(lines, along_width, axes[0].precision)
    columns = lines.view(count, source_height, width * channels)
    if source_height != height:
        columns = _resample(columns, along_height, axes[1].precision)
    return columns.view(count, height, width, channels)


@dataclass(frozen=True, slots=True)
class Taps:
    """The weighted inputs of each output along an axis.

    `table`: int32 [2, taps, outputs], inputs and their weights. Outputs with fewer inputs are filled up with weight 0.
    `precision`: bits of weights below the point.
    """

    table: np.ndarray
    precision: int


def make_taps(source: int, target: int, mode: str) -> Taps:
    """Make the taps of an axis of `source` inputs and `target` outputs."""
    reach, weigh = _FILTERS[mode]
    scale = source / target
    wide = max(scale, 1.0)  # antialiasing: a filter reaches over what an output stands for, at least
    support = reach * wide
    center = scale * (np.arange(target) + 0.5)
    first = np.maximum((center - support + 0.5).astype(np.int64), 0)
    count = np.minimum((center + support + 0.5).astype(np.int64), source) - first
    weights = np.zeros((int(count.max()), target))
    total = np.zeros(target)
    for tap, row in enumerate(weights):  # in this order: sums of float64 depend on it
        row[:] = np.where(tap < count, weigh(np.abs((tap + first - center + 0.5) * (1.0 / wide))), 0.0)
        total += row
    weights /= total
    # the most bits that keep the largest weight within 16
    largest = float(weights.max())
    precision = next((bits for bits in range(22) if int(0.5 + largest * 2 ** (bits + 1)) >= 1 << 15), 22)
    scaled = weights * 2**precision
    rounded = np.trunc(scaled + np.copysign(0.5, scaled))
    places = np.minimum(first + np.arange(len(weights))[:, None], source - 1)
    return Taps(np.stack([places, rounded]).astype(np.int32), precision)


def _resample(x: torch.Tensor, table: torch.Tensor, precision: int) -> torch.Tensor:
    """Resample uint8 [n, inputs, c] to uint8 [n, outputs, c]."""
    count, _, channels = x.shape
    at_once = max(1, _MOST_SUMS // (count * channels))
    parts = []
    for some in table.split(at_once, dim=2):
        shape = count, some.shape[2], channels
        sums = torch.full(shape, 1 << (precision - 1), dtype=torch.int32, device=x.device)
        for places, weights in zip(*some, strict=True):
            sums.addcmul_(x.index_select(1, places), weights[:, None])
        parts.append(sums.bitwise_right_shift_(precision).clamp_(0, 255).to(torch.uint8))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _linear(x: np.ndarray) -> np.ndarray:
    return np.where(x < 1.0, 1.0 - x, 0.0)


def _cubic(x: np.ndarray) -> np.ndarray:
    """Evaluate Keys' filter with a = -0.5, as Pillow has it, at distances that are never negative."""
    near = (1.5 * x - 2.5) * x * x + 1.0
    far = ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))


_FILTERS: dict[str, tuple[float, Callable[[np.ndarray], np.ndarray]]] = {
    "bilinear": (1.0, _linear),
    "bicubic": (2.0, _cubic),
}
"""How far each mode reaches, in outputs, and its weight for a distance."""
