"""Rotary position embedding (Su et al. 2021) on halves: dimension i turns with dimension i + dim/2."""

from __future__ import annotations

import torch

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
