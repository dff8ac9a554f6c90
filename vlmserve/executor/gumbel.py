"""Random choices by Gumbel noise, which is a pure function of (seed, output index, token id): see `sampler`."""

from __future__ import annotations

import torch

from vlmserve_common.kernels import fused

_M1 = -4658895280553007687  # 0xBF58476D1CE4E5B9, the multipliers of SplitMix64's finalizer (Steele et al. 2014)
_M2 = -7723592293110705685  # 0x94D049BB133111EB
_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15


def choose(
    scores: torch.Tensor, ids: torch.Tensor | None, seeds: torch.Tensor, output_indices: torch.Tensor
) -> torch.Tensor:
    """scores float32 [S, V] of tokens `ids` int64 [S, V] (None: 0 .. V - 1 in each row) -> int64 [S]: the token of each
    row with the largest sum of score and noise, the first of equals. seeds, output_indices: int64 [S]."""
    if fused.usable(scores):
        from vlmserve_common.kernels.gpu import sampling  # not where there is no GPU

        return sampling.choose(scores, ids, seeds, output_indices)
    token_ids = torch.arange(scores.shape[1], device=scores.device)[None] if ids is None else ids
    choice = (scores + gumbel(seeds[:, None], output_indices[:, None], token_ids)).argmax(dim=-1)
    return choice if ids is None else ids.gather(1, choice[:, None])[:, 0]


def gumbel(seeds: torch.Tensor, output_indices: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """seeds, output_indices int64 [S, 1], token_ids int64 [S or 1, V] -> float32 [S, V]."""
    stream = _mix(_mix(seeds + _GOLDEN) + output_indices * _GOLDEN)
    bits = _mix(stream + token_ids * _GOLDEN)
    uniform = ((bits >> 11) & 0x1FFFFFFFFFFFFF).double().add_(0.5).mul_(2.0**-53)
    return -torch.log(-torch.log(uniform)).float()


def _mix(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finalizer on int64 bit patterns (arithmetic shifts masked into logical ones)."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _M1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _M2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)
