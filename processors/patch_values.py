"""Patches as they travel, 8-bit levels, to patches as towers take them.

Levels are all there is to know of a patch, in a quarter of the bytes of its values, a picture's in an eighth. So media
are held, cached and sent as levels, and values are made where and when a tower wants them.
"""

from __future__ import annotations

import numpy as np
import torch

from processors.level_scale import LevelScale

# What one operation leaves for the next one then stays in the processor's cache.
_BLOCK_ROWS = 128


def patch_values(levels: np.ndarray, scale: LevelScale, out: torch.Tensor | None = None) -> torch.Tensor:
    """Levels uint8 [n, channels * frames * patch_size**2] -> values float32 [n, that * scale.repeat], bit for bit those
    of transformers' image and video processors. out: where to write them, contiguous, on any device.
    """
    if out is None:
        out = torch.empty(len(levels), value_width(levels, scale), dtype=torch.float32)
    if out.is_cpu:
        _compute(levels, scale, out.numpy())
    else:
        _compute_there(torch.tensor(levels, device=out.device), scale, out)  # levels go there, not values
    return out


def value_width(levels: np.ndarray, scale: LevelScale) -> int:
    """Values of a patch."""
    return int(levels.shape[1]) * scale.repeat


def _compute(levels: np.ndarray, scale: LevelScale, out: np.ndarray) -> None:
    # By numpy, in this thread: torch would share each of these short operations among its threads and wait for all,
    # which takes a hundred times as long while others use the cores.
    channels, (count, width) = len(scale.mean), levels.shape
    each = np.array((scale.mean, scale.std), np.float32)
    mean, std = np.repeat(each, width // channels, axis=1)
    target = out.reshape(count, channels, scale.repeat, width // channels)
    block = np.empty((min(_BLOCK_ROWS, count), width), np.float32)
    for start in range(0, count, _BLOCK_ROWS):
        rows = slice(start, start + _BLOCK_ROWS)
        values = out[rows] if scale.repeat == 1 else block[: len(levels[rows])]
        values[:] = levels[rows]
        np.subtract(values, mean, out=values)
        np.divide(values, std, out=values)
        if scale.repeat > 1:
            target[rows] = values.reshape(len(values), channels, 1, -1)


def _compute_there(levels: torch.Tensor, scale: LevelScale, out: torch.Tensor) -> None:
    channels, (count, width) = len(scale.mean), levels.shape
    each = torch.tensor((scale.mean, scale.std), dtype=torch.float32, device=out.device)
    mean, std = each.repeat_interleave(width // channels, dim=1)
    values = levels.to(torch.float32).sub_(mean).div_(std)
    out.view(count, channels, scale.repeat, width // channels).copy_(values.view(count, channels, 1, width // channels))
