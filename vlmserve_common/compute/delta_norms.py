"""The norms of hybrid models. They round where transformers' do."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from vlmserve_common.compute.layers import rms_normalise
from vlmserve_common.kernels.rows import can_normalise, rms_norm


class ZeroCentredRMSNorm(nn.Module):
    """x / rms(x) * (1 + weight) over the last dimension, all in float32, rounded once."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> the same shape and dtype."""
        factor = self.weight.float() + 1
        if x.dtype == torch.float32 and can_normalise(x):
            return rms_norm(x, factor, self.eps)
        wide = x.float()
        scale = wide.square().mean(-1, keepdim=True).add_(self.eps).rsqrt_()
        return (wide * scale).mul_(factor).to(x.dtype)


class GatedRMSNorm(nn.Module):
    """x / rms(x) * weight * silu(gate) over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x, gate [..., size] -> the same shape and dtype."""
        return (rms_normalise(x, self.eps).mul_(self.weight) * F.silu(gate.float())).to(x.dtype)
