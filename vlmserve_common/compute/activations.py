"""Activations by the names that checkpoints have for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch.nn import functional as F

from vlmserve_common.errors import CheckpointError
from vlmserve_common.kernels import fused


@dataclass(frozen=True, slots=True)
class Activation:
    """An elementwise function. name: in config.json."""

    name: str
    function: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x of any shape -> the same shape and dtype."""
        return self.function(x)

    def gate(self, product: torch.Tensor) -> torch.Tensor:
        """product [N, 2 * size], gates first -> act(gates) * rest [N, size]."""
        if self.name == "silu" and fused.usable(product):
            from vlmserve_common.kernels.gpu.activation import silu_mul  # not where there is no GPU

            return silu_mul(product)
        gates, rest = product.chunk(2, dim=-1)
        return self.function(gates).mul_(rest)


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(1.702 x), the approximation of GELU that CLIP uses."""
    return x * torch.sigmoid(1.702 * x)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU by its tanh approximation (Hendrycks and Gimpel 2016)."""
    return F.gelu(x, approximate="tanh")


_ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        made.name: made
        for made in (
            Activation("silu", F.silu),
            Activation("gelu", F.gelu),
            Activation("quick_gelu", quick_gelu),
            Activation("gelu_pytorch_tanh", gelu_tanh),
        )
    }
)


def activation(name: str) -> Activation:
    """An activation by its name in config.json (`hidden_act`); CheckpointError for one that is not known."""
    if name not in _ACTIVATIONS:
        raise CheckpointError(f"hidden_act is {name!r}; supported are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]
