"""Random matrices, and products of them written out."""

from __future__ import annotations

import torch

from vlmserve_common.compute.activations import activation
from vlmserve_common.kernels.quantized import QuantizedWeight


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


def random_quantized(outer: int, inner: int, bits: int, group: int, seed: int, *, middle: bool) -> QuantizedWeight:
    """All numbers and zeros that there can be; or, with `middle`, zeros in the middle only."""
    generator = torch.Generator().manual_seed(seed)
    groups = -(-inner // group)
    zeros = torch.randint(0, 2**bits + 1, (outer, groups), generator=generator)
    return QuantizedWeight(
        numbers=torch.randint(0, 2**bits, (outer, inner), generator=generator).byte(),
        scales=(torch.randn(outer, groups, generator=generator) / 2**bits).half(),
        zeros=(torch.full_like(zeros, 2 ** (bits - 1)) if middle else zeros).short(),
        bits=bits,
        group=group,
    )


def assert_routed(ids: torch.Tensor, scores: torch.Tensor, logits: torch.Tensor) -> None:
    """Assert that each token's likeliest experts were chosen, each once. Of equally likely ones either may be."""
    odds = torch.softmax(logits, dim=-1, dtype=torch.float32)
    best = odds.topk(ids.shape[1], dim=-1).values
    torch.testing.assert_close(odds.gather(1, ids.long()), best, rtol=1e-6, atol=0)
    assert all(len(set(row)) == len(row) for row in ids.tolist())
    wanted = (best / best.sum(-1, keepdim=True)).to(logits.dtype)
    torch.testing.assert_close(scores, wanted, rtol=max(1e-6, torch.finfo(logits.dtype).eps), atol=0)
