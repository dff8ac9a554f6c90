"""Rotary position embedding (Su et al. 2021) on halves: dimension i turns with dimension i + dim/2.

M-RoPE has positions of three axes (time, height, width), each of which turns its own frequencies.
"""

from __future__ import annotations

import torch

from vlmserve_common.compute.transfers import to_device

# cos and signed sin, as `rotation` makes them.
Rotation = tuple[torch.Tensor, torch.Tensor]


def inverse_frequencies(dim: int, theta: float) -> torch.Tensor:
    """float32 [dim / 2] on the CPU: theta ** (-2i / dim)."""
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim))


def rotation(angles: torch.Tensor, dtype: torch.dtype) -> Rotation:
    """Return cos and signed sin, both [N, 1, dim] in `dtype`, of angles float32 [N, dim / 2], for `rotate`.

    The first half of the sine is negative, so that rotating is one product with x and one with its swapped halves.
    """
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]


def rotate(x: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Return x [N, heads, dim] turned by the angles of `rotation`, as a new tensor."""
    first, second = x.chunk(2, dim=-1)
    swapped = torch.cat((second, first), dim=-1)
    return (x * cos).add_(swapped.mul_(signed_sin))


def contiguous_axes(section: tuple[int, int, int]) -> torch.Tensor:
    """Return the axis of every frequency, int64 [head_dim / 2]: a run for each axis (Qwen2-VL, Qwen2.5-VL)."""
    return torch.repeat_interleave(torch.arange(3, device="cpu"), torch.tensor(section, device="cpu"))


def interleaved_axes(section: tuple[int, int, int]) -> torch.Tensor:
    """Return the axis of every frequency, int64 [head_dim / 2]: time, height, width in turns while they last, then time
    (Qwen3-VL; `recomposition_frequencies` in transformers)."""
    axes = torch.zeros(sum(section), dtype=torch.int64, device="cpu")
    for axis in (1, 2):
        axes[axis : 3 * section[axis] : 3] = axis
    return axes


class MRotary:
    """cos and sin of a step's positions, made once for all layers.

    axes: the axis of every frequency. dtype: the model's; angles are float32, cos and sin are rounded to it.
    """

    def __init__(self, head_dim: int, theta: float, axes: torch.Tensor, dtype: torch.dtype) -> None:
        self._frequencies = inverse_frequencies(head_dim, theta)
        self._axes = axes
        self._dtype = dtype

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and signed sin [N, 1, head_dim] of positions int64 [3, N]; see `compute.rotary.rotate`."""
        if self._axes.device != positions.device:
            self._axes = to_device(self._axes, positions.device)
            self._frequencies = to_device(self._frequencies, positions.device)
        angles = positions[self._axes].t().float() * self._frequencies
        return rotation(angles, self._dtype)
