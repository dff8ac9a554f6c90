"""Rotary position embedding (Su et al. 2021) on halves: dimension i turns with dimension i + dim/2.

M-RoPE has positions of three axes (time, height, width), each of which turns its own frequencies.
"""

from __future__ import annotations

import math

import torch

from vlmserve_common.checkpoint.rope import Llama3Scaling, Rope, YarnScaling
from vlmserve_common.compute.transfers import to_device

# cos and signed sin, as `rotation` makes them.
Rotation = tuple[torch.Tensor, torch.Tensor]


def inverse_frequencies(dim: int, theta: float) -> torch.Tensor:
    """float32 [dim / 2] on the CPU: theta ** (-2i / dim)."""
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim))


def scaled_frequencies(dim: int, rope: Rope) -> torch.Tensor:
    """Return the frequencies that positions turn with, float32 [dim / 2] on the CPU, to the bits of transformers'
    `ROPE_INIT_FUNCTIONS`."""
    plain, scaling = inverse_frequencies(dim, rope.theta), rope.scaling
    if scaling is None:
        return plain
    if isinstance(scaling, YarnScaling):
        wavelengths = rope.theta ** (torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim)
        kept = 1 - _yarn_ramp(dim, rope.theta, scaling)
        return 1.0 / (scaling.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
    if isinstance(scaling, Llama3Scaling):
        return _llama3_frequencies(plain, scaling)
    return plain / scaling.factor


def _yarn_ramp(dim: int, theta: float, scaling: YarnScaling) -> torch.Tensor:
    """Return how much of each frequency is interpolated, float32 [dim / 2], from 0 to 1."""

    def element(turns: float) -> float:
        """Return which element turns so often in the original context."""
        return dim * math.log(scaling.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = element(scaling.beta_fast), element(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    last += 0.001 if first == last else 0  # so that nothing is divided by 0
    return ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - first) / (last - first)).clamp(0, 1)


def _llama3_frequencies(plain: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    wavelengths, original, factor = 2 * math.pi / plain, scaling.original, scaling.factor
    is_long = wavelengths > original / scaling.low_freq
    is_between = ~is_long & ~(wavelengths < original / scaling.high_freq)
    smooth = (original / wavelengths - scaling.low_freq) / (scaling.high_freq - scaling.low_freq)
    between = (1 - smooth) * plain / factor + smooth * plain
    return torch.where(is_long, plain / factor, torch.where(is_between, between, plain))


def rotation(angles: torch.Tensor, dtype: torch.dtype, magnitude: float = 1.0) -> Rotation:
    """Return cos and signed sin, both [N, 1, dim] in `dtype`, of angles float32 [N, dim / 2], for `rotate`.

    The first half of the sine is negative, so that rotating is one product with x and one with its swapped halves.
    magnitude: of both, for a rotation that also makes longer.
    """
    cos, sin = angles.cos(), angles.sin()
    if magnitude != 1:
        cos, sin = cos * magnitude, sin * magnitude
    cos, sin = cos.to(dtype), sin.to(dtype)
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

    def __init__(self, head_dim: int, rope: Rope, axes: torch.Tensor, dtype: torch.dtype) -> None:
        self._frequencies = scaled_frequencies(head_dim, rope)
        self._magnitude = rope.magnitude
        self._axes = axes
        self._dtype = dtype

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and signed sin [N, 1, head_dim] of positions int64 [3, N]; see `compute.rotary.rotate`."""
        if self._axes.device != positions.device:
            self._axes = to_device(self._axes, positions.device)
            self._frequencies = to_device(self._frequencies, positions.device)
        angles = positions[self._axes].t().float() * self._frequencies
        return rotation(angles, self._dtype, self._magnitude)
