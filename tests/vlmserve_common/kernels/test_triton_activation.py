"""SiLU and product in Triton against torch's."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vlmserve_common.kernels.triton_device import DEVICE, DTYPES, assert_rounded_alike, seeded
from vlmserve_common.compute.activations import activation

kernels = pytest.importorskip("vlmserve_common.kernels.gpu.activation")


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
