"""Convolutions as products: each place's neighbours, one behind the other, times a packed weight."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from vlmserve_common.compute.activations import Activation
from vlmserve_common.compute.linear import Linear, pack_weight
from vlmserve_common.kernels import packed_linear as packed_products
from vlmserve_common.kernels.neighbours import neighbours

_KERNEL = 3
_ROWS = 1024
"""Places that are multiplied together: their neighbours are 9 times as many values."""


class Convolution(Linear):
    """A convolution over one or two dimensions, with kernels of 3 and zeros around; stored as torch's `ConvNd` has it.

    Channels lie side by side, unlike torch's: x is [n, *space, channels]. On an unpacked weight it is torch's. `flops`:
    floating-point operations for a place.
    """

    def __init__(self, channels: int, outputs: int, *, dims: int, stride: int = 1) -> None:
        super().__init__(channels * _KERNEL**dims, outputs, bias=True)
        self.weight = nn.Parameter(torch.empty(outputs, channels, *(_KERNEL,) * dims), requires_grad=False)
        self._channels, self._dims, self._stride = channels, dims, stride
        self.flops = 2.0 * self.weight.numel()

    def size(self, before: int) -> int:
        """Return the places along a dimension that had so many."""
        return (before - 1) // self._stride + 1

    def in_order(self, rows: torch.Tensor) -> torch.Tensor:
        """See `Linear`: channels last, and a zero behind an odd number of inputs, which packed weights cannot have."""
        taps = _KERNEL**self._dims
        rows = rows.reshape(len(rows), self._channels, taps).transpose(1, 2).flatten(1)
        return F.pad(rows, (0, rows.shape[1] % 2))

    def pack(self, mode: object = None) -> None:
        """See `Linear`; the weight is never quantised."""
        if self.weight is None:
            return
        rows = self.in_order(self.weight.flatten(1))
        if packed_products.can_pack(rows):
            self.packed = pack_weight(rows, self.bias, None)
            self.weight = self.bias = None

    def forward(
        self, x: torch.Tensor, act: Activation | None = None, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [n, *space, channels] -> act(convolution) [n, *space, outputs]; without a residual."""
        assert residual is None
        if self.packed is None:
            function = F.conv1d if self._dims == 1 else F.conv2d
            assert self.weight is not None
            out = function(x.movedim(-1, 1), self.weight, self.bias, self._stride, padding=1).movedim(1, -1)
            return out if act is None else act(out)
        space = [self.size(before) for before in x.shape[1:-1]]
        places = math.prod(space)
        out = x.new_empty(len(x) * places, self.packed.outputs)
        step = max(1, _ROWS // places)
        rows = x.new_empty(min(step, len(x)) * places, self.packed.inner)
        for first in range(0, len(x), step):
            some = x[first : first + step]
            own = slice(first * places, (first + len(some)) * places)
            neighbours(some, self._stride, rows)
            name = "" if act is None else act.name
            packed_products.linear(rows[: own.stop - own.start], self.packed, act=name, out=out[own])
        return out.view(len(x), *space, -1)
