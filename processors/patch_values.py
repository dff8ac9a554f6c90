"""Patches as they travel, 8-bit levels, to patches as towers take them.

Levels are all there is to know of a patch, in a quarter of the bytes of its values, a picture's in an eighth. So media
are held, cached and sent as levels, and values are made where and when a tower wants them.
"""

from __future__ import annotations

import torch

from processors.level_scale import LevelScale

# On a CPU, what one operation leaves for the next one then stays in the processor's cache.
_BLOCK_ROWS = 128


def patch_values(levels: torch.Tensor, scale: LevelScale, out: torch.Tensor | None = None) -> torch.Tensor:
    """Levels uint8 [n, channels * frames * patch_size**2] -> values float32 [n, that * scale.repeat], bit for bit those
    of transformers' image and video processors. out: where to write them, contiguous, on the levels' device.
    """
    channels, (count, width) = len(scale.mean), levels.shape
    if out is None:
        out = torch.empty(count, width * scale.repeat, device=levels.device)
    each = torch.tensor((scale.mean, scale.std), device=levels.device)
    mean, std = each.repeat_interleave(width // channels, dim=1)
    target = out.view(count, channels, scale.repeat, width // channels)
    step = _BLOCK_ROWS if levels.is_cpu else max(1, count)
    block = torch.empty(min(step, count), width, device=levels.device)
    for start in range(0, count, step):
        part = levels[start : start + step]
        values = block[: len(part)].copy_(part).sub_(mean).div_(std)
        target[start : start + step] = values.view(len(part), channels, 1, width // channels)
    return out
