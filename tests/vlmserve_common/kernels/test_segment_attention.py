"""Attention inside segments: that of float64, for all shapes; a patch never depends on other segments."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vlmserve_common.compute.rotary import rotate, rotation
from vlmserve_common.kernels import library
from vlmserve_common.kernels.segment_attention import SegmentAttention, can_attend

pytestmark = pytest.mark.usefixtures("operators")
SHAPES = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
# of the whole, by dtype: queries, keys and weights are rounded to 8 bits
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 0.012}


def segment_attention(
    qkv: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None, bounds: torch.Tensor
) -> torch.Tensor:
    out = torch.empty_like(qkv[:, 0])
    attention = SegmentAttention(qkv, cos, sin, bounds, out)
    attention.pack(0, len(qkv))
    attention.attend(0, attention.pieces)
    return out


def inputs(lengths: list[int], heads: int, dim: int, dtype: torch.dtype, scale: float = 1.0) -> list[torch.Tensor]:
    """Queries, keys and values, cos, signed sin, bounds; scores are of about that scale."""
    generator = torch.Generator().manual_seed(sum(lengths))
    qkv = torch.randn(sum(lengths), 3, heads, dim, generator=generator)
    qkv[:, 0] *= scale
    angles = torch.rand(sum(lengths), dim // 2, generator=generator) * 100
    return [qkv.to(dtype), *rotation(angles, torch.float32), torch.tensor([0, *lengths]).cumsum(0)]


def truth(qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """float64, segment by segment."""
    lengths = bounds.diff().tolist()
    q, k, v = qkv.double().unbind(1)
    turned = (rotate(part, cos.double(), sin.double()).transpose(0, 1).split(lengths, dim=1) for part in (q, k))
    values = v.transpose(0, 1).split(lengths, dim=1)
    parts = [(a @ b.mT * qkv.shape[-1] ** -0.5).softmax(-1) @ c for a, b, c in zip(*turned, values, strict=True)]
    return torch.cat(parts, dim=1).transpose(0, 1)


def distance(out: torch.Tensor, expected: torch.Tensor) -> float:
    return float((out.double() - expected).norm() / expected.norm())


@SHAPES
@given(
    lengths=st.lists(st.one_of(st.integers(1, 40), st.sampled_from([64, 96, 100, 200])), min_size=1, max_size=5),
    heads=st.integers(1, 3),
    dim=st.one_of(st.integers(1, 16).map(lambda eighth: 8 * eighth), st.sampled_from([2, 36, 64, 72, 80])),
    dtype=DTYPES,
)
def test_segments_attend_to_themselves(lengths, heads, dim, dtype):
    given_ = inputs(lengths, heads, dim, dtype)
    out = segment_attention(*given_)
    assert out.dtype == dtype
    assert out.shape == (sum(lengths), heads, dim)
    assert distance(out, truth(*given_)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("scale", [1.0, 5.0, 30.0])
def test_keys_of_several_rounds_and_large_scores(dtype, scale):
    given_ = inputs([1300, 20], 2, 64, dtype, scale)
    # scores are products of 64 rounded numbers, and their errors grow with them
    limit = TOLERANCE[dtype] * (1 + scale / 2)
    assert distance(segment_attention(*given_), truth(*given_)) < limit


@SHAPES
@given(
    own=st.sampled_from([1, 17, 64, 110, 600]),
    before=st.lists(st.integers(1, 130), max_size=3),
    after=st.lists(st.integers(1, 130), max_size=2),
    dim=st.sampled_from([16, 72, 80]),
    dtype=DTYPES,
    threads=st.integers(1, 3),
)
def test_a_patch_depends_on_its_segment_only_bit_for_bit(operators, own, before, after, dim, dtype, threads):
    qkv, cos, sin, bounds = inputs([*before, own, *after], 2, dim, dtype)
    rows = slice(sum(before), sum(before) + own)
    library.activate("auto", threads=threads)
    together = segment_attention(qkv, cos, sin, bounds)[rows]
    library.activate("auto", threads=2)
    alone = segment_attention(qkv[rows], cos[rows], sin[rows], torch.tensor([0, own]))
    assert torch.equal(together, alone)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("dim", [36, 64])
def test_without_positions_nothing_turns(dtype, dim):
    qkv, cos, sin, bounds = inputs([100, 7], 2, dim, dtype)
    turned = segment_attention(qkv, torch.ones_like(cos), torch.zeros_like(sin), bounds)
    torch.testing.assert_close(segment_attention(qkv, None, None, bounds), turned, atol=1e-6, rtol=0.01)


def test_what_the_library_does_not_attend():
    assert can_attend(torch.empty(1, 3, 1, 128))
    assert not can_attend(torch.empty(1, 3, 1, 130))
    assert not can_attend(torch.empty(1, 3, 1, 64, dtype=torch.float16))
    assert not can_attend(torch.empty(1, 3, 1, 64, device="meta"))
    library.activate("off", threads=1)
    assert not can_attend(torch.empty(1, 3, 1, 64))
