"""Attention inside segments of a packed batch."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from vision.towers.grids import Segments
from vlmserve_common.compute.rotary import Rotation, rotate
from vlmserve_common.kernels import segment_attention as operators


def segment_attention(qkv: torch.Tensor, rotary: Rotation, segments: Segments) -> torch.Tensor:
    """Each patch attends to its own segment: qkv [P, 3, heads, dim], not turned yet -> [P, heads, dim] in its dtype.

    rotary: float32 cos and signed sin [P, 1, dim].
    """
    if operators.can_attend(qkv):
        return operators.segment_attention(qkv, *rotary, segments.bounds)
    heads = qkv.shape[2]
    turned = rotate(qkv[:, :2].flatten(1, 2).float(), *rotary)
    # on a CPU torch attends in float32, and is slower from 16 bits
    dtype = torch.float32 if qkv.is_cpu else qkv.dtype
    parts = torch.cat((turned.to(dtype), qkv[:, 2].to(dtype)), dim=1)
    out = torch.empty_like(qkv[:, 0])
    for group in segments.groups:
        q, k, v = parts[group.rows].unflatten(0, (-1, group.length)).transpose(1, 2).split(heads, dim=1)
        attended = F.scaled_dot_product_attention(q, k, v)
        out[group.rows] = attended.transpose(1, 2).flatten(0, 1).to(out.dtype)
    return out
