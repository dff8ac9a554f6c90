"""Random matrices, and products of them written out."""

from __future__ import annotations

import torch

from vlmserve_common.compute.activations import activation


def random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Make normal numbers from a seed, on the CPU."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def true_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    offset: torch.Tensor | None,
    residual: torch.Tensor | None,
    *,
    act: str,
    gated: bool,
) -> torch.Tensor:
    """Compute residual + act(x weight^T + offset) in float64; gated: act(first half) * second half."""
    truth = x.double() @ weight.double().t() + (0 if offset is None else offset.double())
    truth, rest = truth.chunk(2, dim=1) if gated else (truth, 1)
    truth = (activation(act)(truth) if act else truth) * rest
    return truth + (0 if residual is None else residual.double())
