"""The parts that the families' towers are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from vision.towers.attention import segment_attention
from vision.towers.grids import Grid, Segments
from vlmserve_common.compute.activations import Activation
from vlmserve_common.compute.linear import Linear, PatchProjection
from vlmserve_common.compute.rotary import Rotation, inverse_frequencies, rotation

NORM_EPS = 1e-6
# Rows that go through an MLP together on a CPU, at the most: what is between its products is several times as wide.
_MLP_ROWS = 2048


def row_tiles(x: torch.Tensor, most: int) -> list[slice]:
    """The rows of x that are computed together: `most` or fewer, about as many in each part; all of them on a GPU."""
    parts = -(-len(x) // most) if x.is_cpu else 1
    step = max(1, -(-len(x) // max(1, parts)))
    return [slice(first, first + step) for first in range(0, len(x), step)]


class VisionTower(nn.Module):
    """What the encoder knows of a tower.

    spatial_merge_size: patches merged per side. out_hidden_size: width of the main embeddings. num_deepstack_layers:
    embeddings of that width that follow the main one, one per tapped layer. num_full_attention: layers that attend over
    a whole temporal patch rather than over windows; None: all.
    """

    spatial_merge_size: int
    out_hidden_size: int
    num_deepstack_layers: int = 0
    num_full_attention: int | None = None

    def forward(self, pixel_values: torch.Tensor, grid_thw: Sequence[Grid]) -> torch.Tensor:
        """Encode a packed batch: every embedding depends on its own temporal patch only.

        pixel_values float32 [P, channels * frames * patch**2], all items' patches in the processor's order; grid_thw:
        patches of every item in time, height and width. Returns embeddings [P / merge**2, out_hidden_size * (1 +
        num_deepstack_layers)] in the tower's dtype. Raises ValueError when grids and pixels do not fit.
        """
        raise NotImplementedError


class PatchEmbed(nn.Module):
    """Flattened patches -> tokens."""

    def __init__(self, kernel: tuple[int, int, int, int], size: int, *, bias: bool) -> None:
        super().__init__()
        self.proj = PatchProjection(kernel, size, bias=bias)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """float32 [P, patch elements] -> [P, size] in the weights' dtype."""
        return self.proj(pixel_values.to(self.proj.dtype))


class AxialRotary:
    """Two-dimensional rotary positions: half of the frequencies turn with the row, half with the column."""

    def __init__(self, head_dim: int, theta: float) -> None:
        self._frequencies = inverse_frequencies(head_dim // 2, theta)

    def __call__(self, coordinates: torch.Tensor, device: torch.device) -> Rotation:
        """coordinates int64 [2, P] on the CPU -> float32 cos and signed sin [P, 1, head_dim] on the device."""
        angles = coordinates[:, :, None].float() * self._frequencies
        cos, sin = rotation(torch.cat((angles[0], angles[1]), dim=-1), torch.float32)
        return cos.to(device), sin.to(device)


class VisionAttention(nn.Module):
    """Full attention inside each segment."""

    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = Linear(size, 3 * size, bias=True)
        self.proj = Linear(size, size, bias=True)

    def forward(self, x: torch.Tensor, rotary: Rotation, segments: Segments, residual: torch.Tensor) -> torch.Tensor:
        """x [P, size] -> [P, size], added to `residual`."""
        qkv = self.qkv(x).unflatten(1, (3, self.num_heads, -1))
        return self.proj(segment_attention(qkv, rotary, segments).flatten(1), residual=residual)


class VisionMLP(nn.Module):
    """fc2(act(fc1(x))) with the family's layer names."""

    def __init__(self, names: tuple[str, str], sizes: tuple[int, int, int], act: Activation) -> None:
        super().__init__()
        self._names = names
        for name, size, out in zip(names, sizes, sizes[1:], strict=False):
            self.add_module(name, Linear(size, out, bias=True))
        self.act = act

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x [P, sizes[0]] -> [P, sizes[2]], added to `residual`."""
        first, second = (self.get_submodule(name) for name in self._names)
        return second(first(x, self.act), residual=residual)


class VisionBlock(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, make_norm: Callable[[], nn.Module], attn: VisionAttention, mlp: nn.Module) -> None:
        super().__init__()
        self.norm1 = make_norm()
        self.norm2 = make_norm()
        self.attn = attn
        self.mlp = mlp

    def forward(self, x: torch.Tensor, rotary: Rotation, segments: Segments) -> torch.Tensor:
        """x [P, size] -> [P, size]."""
        x = self.attn(self.norm1(x), rotary, segments, residual=x)
        for rows in row_tiles(x, _MLP_ROWS):
            x[rows] = self.mlp(self.norm2(x[rows]), residual=x[rows])
        return x


class QwenPatchMerger(nn.Module):
    """merge x merge neighbouring tokens -> one embedding (Qwen2-VL, Qwen2.5-VL)."""

    def __init__(self, norm: nn.Module, merged_size: int, out_size: int, act: Activation) -> None:
        super().__init__()
        self.ln_q = norm
        self.mlp = VisionMLP(("0", "2"), (merged_size, merged_size, out_size), act)
        self._merged_size = merged_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [P, size] -> [P / merge**2, out_size]."""
        return self.mlp(self.ln_q(x).view(-1, self._merged_size))
