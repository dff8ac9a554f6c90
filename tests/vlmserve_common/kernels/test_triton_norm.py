"""RMSNorm in Triton against torch's, rounded at the same places."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vlmserve_common.kernels.triton_device import DEVICE, DTYPES, assert_rounded_alike, seeded
from vlmserve_common.compute.layers import rms_normalise

norm = pytest.importorskip("vlmserve_common.kernels.gpu.norm")


@settings(max_examples=10)
@given(st.integers(1, 5), st.integers(1, 300), st.sampled_from(DTYPES), st.integers(0, 99))
def test_rms_norm_alone_and_behind_a_sum(rows, size, dtype, seed):
    x, residual = seeded(seed, rows, size, dtype=dtype), seeded(seed + 1, rows, size, dtype=dtype)
    weight = 1 + seeded(seed + 2, size, dtype=dtype) / 4
    assert_rounded_alike(norm.rms_norm(x, weight, 1e-6), rms_normalise(x, 1e-6) * weight)
    before, total = x.clone(), x + residual
    assert_rounded_alike(norm.add_rms_norm(x, residual, weight, 1e-6), rms_normalise(total, 1e-6) * weight)
    assert torch.equal(residual, total)
    assert torch.equal(x, before)


def test_shapes_are_kept_and_rows_of_zeros_stay():
    weight = torch.ones(48, device=DEVICE)
    assert norm.rms_norm(torch.zeros(2, 3, 48, device=DEVICE), weight, 1e-6).eq(0).all()
    assert norm.rms_norm(torch.zeros(0, 48, device=DEVICE), weight, 1e-6).shape == (0, 48)
