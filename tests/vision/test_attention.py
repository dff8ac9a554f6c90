"""Attention inside segments by torch, where there are no operators: against the true one, however it is grouped."""

from __future__ import annotations

import pytest
import torch

from vision.towers.attention import segment_attention
from vision.towers.grids import Segments
from vision.towers.pieces import UNLIMITED, finish
from vlmserve_common.compute.rotary import rotate, rotation

HEADS, DIM = 3, 16
CPU = torch.device("cpu")


def truth(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """float64 [count, HEADS, DIM], segment by segment."""
    q, k, v = (part.double() for part in qkv.unbind(1))
    q, k = (rotate(part, cos.double(), sin.double()) for part in (q, k))
    split = (part.transpose(0, 1).split(lengths, dim=1) for part in (q, k, v))
    parts = [(a @ b.mT * DIM**-0.5).softmax(-1) @ c for a, b, c in zip(*split, strict=True)]
    return torch.cat(parts, dim=1).transpose(0, 1)


# neighbours of one length, one length in several places, a segment of one patch
@pytest.mark.parametrize("lengths", [[12, 12, 12], [8, 5, 8, 1, 8], [40]])
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 0.005)], ids=str)
def test_segments_attend_to_themselves(lengths, dtype, limit):
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(sum(lengths), 3, HEADS, DIM, generator=generator).to(dtype)
    rotary = rotation(torch.rand(sum(lengths), DIM // 2, generator=generator) * 6, torch.float32)
    out = finish(segment_attention(qkv, rotary, Segments(lengths, CPU), UNLIMITED))
    assert out.dtype == dtype
    assert out.shape == (sum(lengths), HEADS, DIM)
    expected = truth(qkv, *rotary, lengths)
    assert (out.double() - expected).norm() / expected.norm() < limit
