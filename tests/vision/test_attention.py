"""Attention inside segments: the 16-bit way against the true one, however large scores are and however it is tiled."""

from __future__ import annotations

import pytest
import torch

from vision.towers import attention
from vision.towers.grids import group_segments

torch.set_num_threads(1)
HEADS, DIM = 3, 16


def random_qkv(count: int, scale: float, seed: int = 0) -> torch.Tensor:
    """[3 * HEADS, count, DIM] bfloat16; scores are of about that scale."""
    parts = torch.randn(3, HEADS, count, DIM, generator=torch.Generator().manual_seed(seed))
    parts[0] *= scale * DIM**-0.5
    return parts.flatten(0, 1).bfloat16()


def truth(qkv: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """float64 [count, HEADS, DIM], segment by segment."""
    q, k, v = (part.double().split(lengths, dim=1) for part in qkv.chunk(3))
    parts = [(a @ b.mT).softmax(-1) @ c for a, b, c in zip(q, k, v, strict=True)]
    return torch.cat(parts, dim=1).transpose(0, 1)


def distance(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


@pytest.fixture(params=["float32", "16-bit"])
def way(request, monkeypatch):
    """Both ways, whatever this CPU is."""
    monkeypatch.setattr(attention, "fast_in_16_bits", lambda dtype: request.param == "16-bit")
    return request.param


# neighbours of one length, one length in several places, a segment of one patch
@pytest.mark.parametrize("lengths", [[12, 12, 12], [8, 5, 8, 1, 8], [40]])
@pytest.mark.parametrize("scores", [1 << 20, 100, 1])
def test_segments_attend_to_themselves(way, lengths, scores, monkeypatch):
    monkeypatch.setattr(attention, "_SCORES", scores)
    qkv = random_qkv(sum(lengths), 1.0)
    if way == "float32":
        qkv = qkv.float()
    out = attention.segment_attention(qkv, group_segments(lengths, torch.device("cpu")))
    assert out.dtype == qkv.dtype
    assert out.shape == (sum(lengths), HEADS, DIM)
    assert distance(out, truth(qkv, lengths)) < (1e-6 if way == "float32" else 0.005)


@pytest.mark.parametrize("scale", [1.0, 5.0, 30.0])
def test_large_scores_are_as_near_as_those_of_torch(scale):
    qkv = random_qkv(300, scale)
    expected = truth(qkv, [300])
    q, k, v = (part[:, None] for part in qkv.chunk(3))
    ours = distance(attention._attend_16bit(q, k, v)[:, 0].transpose(0, 1), expected)
    theirs = distance(attention._attend(q, k, v)[:, 0].transpose(0, 1), expected)
    assert ours < 2 * theirs
    assert ours < 0.006


def test_the_dtype_is_the_faster_one(way):
    x = torch.zeros(1, dtype=torch.bfloat16)
    assert attention.attention_dtype(x) == (torch.float32 if way == "float32" else torch.bfloat16)
    assert attention.attention_dtype(x.to("meta")) == torch.bfloat16
