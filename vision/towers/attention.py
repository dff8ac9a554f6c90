"""Attention inside segments of a packed batch.

On a CPU that multiplies bfloat16 in hardware, products in 16 bits are several times as fast as those of torch's fused
attention, which computes in float32. What they round is kept harmless: see `_attend_16bit`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn import functional as F

from vision.towers.grids import SegmentGroup
from vlmserve_common.compute.linear import fast_in_16_bits

# Scores computed at a time: 2 MiB, which stay in the processor's cache.
_SCORES = 1 << 20


def attention_dtype(x: torch.Tensor) -> torch.dtype:
    """In which dtype activations like x are attended fastest: their own, but float32 on most CPUs."""
    return torch.float32 if x.is_cpu and not fast_in_16_bits(x.dtype) else x.dtype


def segment_attention(qkv: torch.Tensor, groups: Iterable[SegmentGroup]) -> torch.Tensor:
    """qkv [3 * heads, P, dim], queries scaled, each patch attending to its own segment -> [P, heads, dim]."""
    q, k, v = qkv.chunk(3)
    heads, count, dim = q.shape
    out = q.new_empty((count, heads, dim))
    attend = _attend_16bit if q.is_cpu and fast_in_16_bits(q.dtype) else _attend
    for group in groups:
        parts = (part[:, group.rows].unflatten(1, (-1, group.length)) for part in (q, k, v))
        out[group.rows] = attend(*parts).permute(1, 2, 0, 3).flatten(0, 1)
    return out


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[heads, segments, n, dim] each -> the same shape."""
    q, k, v = (part.transpose(0, 1) for part in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, scale=1.0).transpose(0, 1)


def _attend_16bit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """`_attend` with all products in bfloat16.

    Scores are computed twice: first for each query's highest, then less that, so that they are rounded when they are
    small. A score d below the highest is then off by d / 512 at the most and counts exp(-d): nothing is off by more
    than the weights' own rounding, however large scores are.
    """
    shape, n = q.shape, q.shape[2]
    q, k, v = (part.reshape(-1, *shape[2:]) for part in (q, k, v))
    out = torch.empty_like(q)
    step = max(1, _SCORES // n**2)
    rows = n if step > 1 else max(1, _SCORES // n)
    for first in range(0, len(q), step):
        part = slice(first, first + step)
        keys, values = k[part].transpose(1, 2), v[part]
        for row in range(0, n, rows):
            queries = q[part, row : row + rows]
            scores = torch.bmm(queries, keys)
            highest = scores.amax(-1, keepdim=True).expand_as(scores)
            weights = torch.baddbmm(highest, queries, keys, beta=-1).softmax(-1)
            out[part, row : row + rows] = torch.bmm(weights, values)
    return out.view(shape)
