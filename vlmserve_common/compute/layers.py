"""Small layers that towers and decoders share. They round where transformers' do, so 16-bit answers stay close."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F

from vlmserve_common.compute.activations import Activation
from vlmserve_common.compute.communicator import ALONE, Communicator
from vlmserve_common.compute.linear import MergedLinear, row_linear
from vlmserve_common.compute.shard import Cut
from vlmserve_common.kernels import fused
from vlmserve_common.kernels.rows import can_normalise, layer_norm, rms_norm
from vlmserve_common.kernels.streams import stream_norm


class _Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps


class RMSNorm(_Norm):
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich 2019); the division in float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> the same shape and dtype."""
        if can_normalise(x):
            return rms_norm(x, self.weight, self.eps)
        if fused.usable(x):
            from vlmserve_common.kernels.gpu import norm  # not where there is no GPU

            return norm.rms_norm(x, self.weight, self.eps)
        return rms_normalise(x, self.eps).mul_(self.weight)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """`forward` of x + residual, a new tensor. residual, of x's shape and dtype, becomes the sum."""
        if fused.usable(x) and fused.usable(residual):
            from vlmserve_common.kernels.gpu import norm

            return norm.add_rms_norm(x, residual, self.weight, self.eps)
        return self(residual.add_(x))


def rms_normalise(x: torch.Tensor, eps: float) -> torch.Tensor:
    """A new tensor x / sqrt(mean(x^2) + eps) over the last dimension, computed in float32, in x's dtype."""
    wide = x.float()
    scale = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype)


class ZeroCentredRMSNorm(_Norm):
    """x / rms(x) * (1 + weight) over the last dimension, all in float32, rounded once (hybrid models). streams: so many
    equal parts of that dimension are normalised each by itself."""

    def __init__(self, size: int, eps: float, streams: int = 1) -> None:
        super().__init__(size, eps)
        self._streams = streams

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> the same shape and dtype."""
        if can_normalise(x):
            return stream_norm(x, self.weight, self._streams, self.eps)
        wide = x.float().unflatten(-1, (self._streams, -1))
        scale = wide.square().mean(-1, keepdim=True).add_(self.eps).rsqrt_()
        factor = (self.weight.float() + 1).view(self._streams, -1)
        return (wide * scale).mul_(factor).flatten(-2).to(x.dtype)


class GatedRMSNorm(_Norm):
    """x / rms(x) * weight * act(gate) over the last dimension (hybrid models). act: silu or sigmoid."""

    def __init__(self, size: int, eps: float, act: str = "silu") -> None:
        super().__init__(size, eps)
        self._act = F.silu if act == "silu" else torch.sigmoid

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x, gate [N, heads, size] -> the same shape and dtype."""
        if fused.usable(x) and gate[:1].is_contiguous():
            from vlmserve_common.kernels.gpu import norm

            return norm.gated_rms_norm(x, self.weight, gate, self.eps, sigmoid=self._act is torch.sigmoid)
        return (rms_normalise(x, self.eps).mul_(self.weight) * self._act(gate.float())).to(x.dtype)


class LayerNorm(_Norm):
    """Layer normalisation over the last dimension with weight and bias."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> the same shape and dtype."""
        if can_normalise(x):
            return layer_norm(x, self.weight, self.bias, self.eps)
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class Embedding(nn.Module):
    """A table of rows [count, size]."""

    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, size), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids int64 [...] -> [..., size]."""
        return F.embedding(ids, self.weight)


class VocabEmbedding(nn.Module):
    """An `Embedding` cut by tokens. Each process looks its own tokens up, and the rows are added up over all."""

    def __init__(self, count: int, size: int, comm: Communicator) -> None:
        super().__init__()
        self.cut, rows = comm.shard.cut_vocab(count)
        self.weight = nn.Parameter(torch.empty(rows, size), requires_grad=False)
        self._comm = comm

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids int64 [N] -> [N, size]."""
        own = self._comm.all_tokens(ids) - self.cut.start
        elsewhere = (own < 0) | (own >= self.cut.size)
        rows = F.embedding(own.masked_fill(elsewhere, 0), self.weight)
        return self._comm.all_reduce(rows.masked_fill_(elsewhere[:, None], 0))

    def stored_parameters(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """See `checkpoint.weights`."""
        yield f"{name}.weight", self.weight[: self.cut.size]

    def stored_cuts(self, name: str) -> Iterator[tuple[str, Cut]]:
        """See `checkpoint.weights`."""
        yield f"{name}.weight", self.cut


class GatedMLP(nn.Module):
    """An MLP that computes down(act(gate(x)) * up(x)) (Shazeer 2020).

    comm: between the processes that cut the inner elements among them. summed: see `compute.linear.RowLinear`; if
    False, x already has the tokens of all groups. what: the name of intermediate_size, for errors.
    """

    def __init__(
        self,
        size: int,
        intermediate_size: int,
        act: Activation,
        *,
        bias: bool,
        comm: Communicator = ALONE,
        summed: bool = True,
        what: str = "intermediate_size",
    ) -> None:
        super().__init__()
        inner = comm.shard.cut(intermediate_size, what)
        part = intermediate_size if comm.shard.is_whole else inner
        self.gate_up_proj = MergedLinear(size, {"gate_proj": part, "up_proj": part}, bias=bias, gated=True)
        self.down_proj = row_linear(intermediate_size, size, bias=bias, comm=comm, what=what, summed=summed)
        self.act = act
        self._comm = comm if summed else ALONE

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x [N, size] -> [N, size], added to `residual`."""
        return self.down_proj(self.gate_up_proj(self._comm.all_tokens(x), self.act), residual=residual)
