"""Turns uint8 patches into the `pixel_values` that towers take.

A patch's pixels take a quarter of the bytes of its values, and a picture's an eighth. So media are held, cached and
sent as uint8, and normalized on the tower's device, just before they are encoded.
"""

from __future__ import annotations

import numpy as np
import torch

from processors.inputs import Normalization
from vlmserve_common.compute.transfers import to_device

# What one operation leaves for the next one then stays in the processor's cache.
_BLOCK_ROWS = 128


def normalize(patches: np.ndarray | torch.Tensor, how: Normalization, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return float32 [n, width * how.repeat] for uint8 patches [n, width], where width is channels * frames *
    patch_size**2.

    The bits are those of the `pixel_values` of transformers' image and video processors. `out`: where to write them,
    contiguous, on any device. Patches are on the CPU or on that device.
    """
    if out is None:
        out = torch.empty(len(patches), value_width(patches, how), dtype=torch.float32)
    if out.is_cpu:
        _on_cpu(np.asarray(patches), how, out.numpy())
    else:
        source = patches if isinstance(patches, torch.Tensor) else torch.from_numpy(patches)
        _on_device(to_device(source, out.device), how, out)  # uint8 goes there, not float32
    return out


def value_width(patches: np.ndarray | torch.Tensor, how: Normalization) -> int:
    """Return the number of values in a patch."""
    return int(patches.shape[1]) * how.repeat


def _on_cpu(patches: np.ndarray, how: Normalization, out: np.ndarray) -> None:
    # By numpy, in this thread: torch would share each of these short operations among its threads and wait for all,
    # which takes a hundred times as long while others use the cores.
    channels, (count, width) = len(how.mean), patches.shape
    mean, std = np.repeat(np.array((how.mean, how.std), np.float32), width // channels, axis=1)
    target = out.reshape(count, channels, how.repeat, width // channels)
    block = np.empty((min(_BLOCK_ROWS, count), width), np.float32)
    for start in range(0, count, _BLOCK_ROWS):
        rows = slice(start, start + _BLOCK_ROWS)
        values = out[rows] if how.repeat == 1 else block[: len(patches[rows])]
        values[:] = patches[rows]
        np.subtract(values, mean, out=values)
        np.divide(values, std, out=values)
        if how.repeat > 1:
            target[rows] = values.reshape(len(values), channels, 1, -1)


def _on_device(patches: torch.Tensor, how: Normalization, out: torch.Tensor) -> None:
    channels, (count, width) = len(how.mean), patches.shape
    each = torch.tensor((how.mean, how.std), dtype=torch.float32).repeat_interleave(width // channels, dim=1)
    mean, std = to_device(each, out.device)
    values = patches.to(torch.float32).sub_(mean).div_(std)
    out.view(count, channels, how.repeat, width // channels).copy_(values.view(count, channels, 1, width // channels))
