"""Several residual streams in place of one (hyper connections, arXiv:2409.19606)."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from vlmserve.models.config import ModelConfig
from vlmserve_common.compute.layers import ZeroCentredRMSNorm
from vlmserve_common.compute.linear import Linear
from vlmserve_common.kernels.rows import can_normalise
from vlmserve_common.kernels.streams import StreamReader, stream_add, stream_mix


class StreamMixer(nn.Module):
    """Mixes the streams into one: the mean of the normed streams, each element times a gate.

    The gates come from all normed streams, by a product of low rank (`Qwen4ExpTextGatedResidual` in transformers).
    Behind the last layer it stands in place of the final norm.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.streams is not None
        self.hc_norm = ZeroCentredRMSNorm(config.stream_size, config.rms_norm_eps, config.streams.count)
        self.input_mix_weight_down = Linear(config.stream_size, config.streams.rank, bias=False)
        self.input_mix_weight_up = Linear(config.streams.rank, config.stream_size, bias=False)
        self._count = config.streams.count
        self._reader: StreamReader | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [N, streams * hidden] -> [N, hidden]."""
        reader = self._native(x)
        return self._mixed(self.hc_norm(x)) if reader is None else reader(x, self._count)[0]

    def _products(self) -> list[Linear]:
        return [self.input_mix_weight_down, self.input_mix_weight_up]

    def _native(self, x: torch.Tensor) -> StreamReader | None:
        """Return what computes all of it at once, if that is possible for x."""
        products = self._products()
        down, up, *inject = [product.packed for product in products]
        changed = any(product.adapters is not None and product.adapters[0].adapters for product in products)
        if down is None or up is None or None in inject or changed or not can_normalise(x):
            return None
        if self._reader is None or self._reader.weights[0] is not down:
            self._reader = StreamReader(self.hc_norm.weight, self.hc_norm.eps, down, up, inject[0] if inject else None)
        return self._reader

    def _mixed(self, normed: torch.Tensor) -> torch.Tensor:
        inner = F.silu(self.input_mix_weight_down(normed) / self._count)
        gates = self.input_mix_weight_up(inner)
        if can_normalise(normed):
            return stream_mix(gates, normed, self._count)
        return (gates.sigmoid_() * normed).unflatten(-1, (self._count, -1)).mean(dim=-2)


class HyperConnection(StreamMixer):
    """Mixes the streams into the input of a block, and adds the block's output to each stream, times a weight."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.block_inject_weight = Linear(config.stream_size, self._count, bias=False)
        self.block_inject_weight.may_be_quantised = False

    def _products(self) -> list[Linear]:
        return [*super()._products(), self.block_inject_weight]

    def read(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a block's input [N, hidden] from x [N, streams * hidden], and what the weights of its output are made
        of, [N, streams]."""
        if (reader := self._native(x)) is not None:
            return reader(x, self._count)
        normed = self.hc_norm(x)
        return self._mixed(normed), self.block_inject_weight(normed)

    def write(self, x: torch.Tensor, out: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Return x with a block's output [N, hidden] added, as a new tensor. logits: of `read`."""
        if can_normalise(x):
            return stream_add(x, out, logits, self._count)
        weights = 2 * (logits / self._count).sigmoid_()
        return x + (out.unsqueeze(-2) * weights.unsqueeze(-1)).flatten(-2)
