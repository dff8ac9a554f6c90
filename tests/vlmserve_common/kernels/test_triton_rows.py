"""SiLU and product, and RMSNorm, in Triton against torch's, rounded at the same places."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vlmserve_common.kernels.triton_device import DEVICE, DTYPES, assert_rounded_alike, seeded
from vlmserve_common.compute.activations import activation
from vlmserve_common.compute.layers import rms_normalise

kernels = pytest.importorskip("vlmserve_common.kernels.gpu.activation")
norm = pytest.importorskip("vlmserve_common.kernels.gpu.norm")


@settings(max_examples=10)
@given(st.integers(0, 4), st.sampled_from([1, 40, 1023, 1024, 1025]), st.sampled_from(DTYPES), st.integers(0, 99))
def test_silu_mul(rows, size, dtype, seed):
    product = seeded(seed, rows, 2 * size, dtype=dtype) * 4
    found = kernels.silu_mul(product)
    assert_rounded_alike(found, activation("silu").gate(product))


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_gates_far_from_zero():
    gates = torch.tensor([[-1e4, -90.0, 90.0, 1e4]], device=DEVICE)
    found = kernels.silu_mul(torch.cat((gates, torch.ones_like(gates)), dim=1))
    assert found.tolist() == [[0.0, pytest.approx(0, abs=1e-30), 90.0, 1e4]]


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
