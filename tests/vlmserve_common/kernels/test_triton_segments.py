"""Attention inside segments in Triton: that of float64, for all shapes; a patch never depends on other segments."""

from __future__ import annotations

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from tests.vlmserve_common.kernels.test_segment_attention import distance, inputs, truth
from tests.vlmserve_common.kernels.triton_device import DEVICE
from vision.towers.attention import by_gpu_kernels
from vision.towers.grids import Segments
from vision.towers.pieces import finish
from vlmserve_common.kernels import fused
from vlmserve_common.kernels.gpu.segments import segment_attention, turn

TOLERANCE = {torch.float32: 2e-6, torch.float16: 0.002, torch.bfloat16: 0.012}
LENGTHS = st.lists(st.one_of(st.integers(1, 40), st.sampled_from([64, 65, 100])), min_size=1, max_size=3)


def attend(qkv, cos, sin, bounds) -> torch.Tensor:
    """On a copy, as it is overwritten."""
    rotary = (cos.to(DEVICE), sin.to(DEVICE))
    return finish(by_gpu_kernels(qkv.to(DEVICE, copy=True), rotary, Segments(bounds.diff().tolist(), DEVICE))).cpu()


@pytest.mark.slow
@settings(max_examples=10)
@given(
    LENGTHS, st.integers(1, 3), st.sampled_from([8, 16, 24, 32, 40, 64, 72, 80, 96, 128]), st.sampled_from([*TOLERANCE])
)
def test_segments_attend_to_themselves(lengths, heads, dim, dtype):
    asked = inputs(lengths, heads, dim, dtype)
    out = attend(*asked)
    assert out.dtype == dtype
    assert out.shape == (sum(lengths), heads, dim)
    assert distance(out, truth(*asked)) < TOLERANCE[dtype]


def test_large_scores():
    asked = inputs([150, 20], 1, 72, torch.float32, 30.0)
    assert distance(attend(*asked), truth(*asked)) < 4e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_patch_depends_on_its_segment_only_bit_for_bit(dtype):
    qkv, cos, sin, bounds = inputs([9, 33, 7], 2, 72, dtype)
    rows = slice(9, 42)
    alone = attend(qkv[rows], cos[rows], sin[rows], torch.tensor([0, 33]))
    qkv[:9] = qkv[42:] = torch.nan
    assert torch.equal(attend(qkv, cos, sin, bounds)[rows], alone)


def test_a_patch_is_the_same_in_tiles_of_either_size():
    qkv, cos, sin, _ = inputs([50], 2, 72, torch.bfloat16)
    qkv, cos, sin = (part.to(DEVICE) for part in (qkv, cos, sin))
    turn(qkv, cos, sin)
    outs = [segment_attention(qkv, Segments([50], DEVICE).tiles(rows), rows) for rows in (64, 128)]
    assert torch.equal(*outs)


def test_empty_tiles_do_nothing():
    qkv, *_ = inputs([20], 1, 16, torch.float32)
    qkv = qkv.to(DEVICE)
    tiles = Segments([20], DEVICE).tiles(32)
    padded = torch.cat([tiles, torch.zeros(2, 3, dtype=torch.int32, device=DEVICE)])
    assert torch.equal(segment_attention(qkv, padded, 32), segment_attention(qkv, tiles, 32))


def test_tiles_have_every_query_once_and_long_segments_first():
    tiles = Segments([3, 130, 64, 1], torch.device("cpu")).tiles(64).tolist()
    assert tiles == [[3, 133, 3], [3, 133, 67], [3, 133, 131], [133, 197, 133], [0, 3, 0], [197, 198, 197]]


def test_a_trial_tells_whether_they_work(monkeypatch, caplog):
    asked = (DEVICE, torch.bfloat16, 72)
    try_it = fused.gpu_kernels_work.__wrapped__  # without what is remembered
    assert try_it(*asked)
    monkeypatch.setattr("vlmserve_common.kernels.gpu.segments.turn", lambda qkv, cos, sin: qkv.mul_(3))
    with caplog.at_level(logging.WARNING):
        assert not try_it(*asked)
    assert "not by Triton: its kernels are wrong on this device" in caplog.text

    def fail(*_):
        raise RuntimeError("no compiler\nand a long story")

    monkeypatch.setattr("vlmserve_common.kernels.gpu.segments.turn", fail)
    assert not try_it(*asked)
    assert caplog.text.strip().endswith("RuntimeError: no compiler")
