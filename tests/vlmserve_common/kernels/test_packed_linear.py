"""Products with packed weights: torch's in float64, rounded once, for all shapes; a row never depends on others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.vlmserve_common.kernels.products import random, random_quantized, true_product
from vlmserve_common.kernels.packed_linear import ACTS, linear, pack
from vlmserve_common.kernels.quantized import pack_quantized

pytestmark = pytest.mark.usefixtures("operators")
SHAPES = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8}


@SHAPES
@given(
    # few; more than are worth writing a panel's numbers out for; more than pass a panel at a time
    rows=st.one_of(st.integers(1, 20), st.sampled_from([31, 33, 47, 49, 64, 191, 193, 500])),
    half=st.integers(1, 160),
    outer=st.integers(1, 200),
    bits=st.sampled_from([None, 4, 8]),
    group=st.sampled_from([8, 32, 64, 128, 512]),
    middle=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    act=st.sampled_from(sorted(ACTS)),
    bias=st.booleans(),
    residual=st.booleans(),
    gated=st.booleans(),
    seed=st.integers(0, 9),
)
def test_products_are_the_true_ones_rounded_once(
    rows, half, outer, bits, group, middle, dtype, act, bias, residual, gated, seed
):
    outer, inner = (2 * outer if gated else outer), 2 * half if bits is None else -(-half // 4) * 8
    x, offset = random(rows, inner, dtype=dtype, seed=seed), random(outer, dtype=dtype, seed=seed + 2) if bias else None
    if bits is None:
        weight = random(outer, inner, dtype=dtype, seed=seed + 1)
        packed = pack(weight, offset, gated=gated)
    else:
        quantized = random_quantized(outer, inner, bits, group, seed, middle=middle)
        weight, packed = quantized.dequantize(), pack_quantized(quantized, offset, dtype, gated=gated)
        assert packed.shifted is bool((quantized.zeros != 2 ** (bits - 1)).any())
    other = random(rows, packed.outputs, dtype=dtype, seed=seed + 3) if residual else None
    truth = true_product(x, weight, offset, other, act=act, gated=gated)
    out = linear(x, packed, act=act, residual=other)
    assert out.dtype == dtype
    assert out.shape == (rows, packed.outputs)
    scale = inner * (10 if gated else 1)  # of what is summed before anything is rounded
    torch.testing.assert_close(
        out.double(), truth, rtol=TOLERANCE[dtype], atol=(1e-6 if bits is None else 2e-6) * scale
    )


@SHAPES
@given(
    rows=st.integers(1, 60),
    others=st.integers(0, 250),
    inner=st.sampled_from([64, 136, 192]),
    outer=st.sampled_from([48, 64, 200]),
    bits=st.sampled_from([None, 4, 8]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_row_is_the_same_in_every_batch(rows, others, inner, outer, bits, dtype):
    if bits is None:
        packed = pack(random(outer, inner, dtype=dtype, seed=0), None)
    else:
        packed = pack_quantized(random_quantized(outer, inner, bits, 64, 0, middle=False), None, dtype)
    x = random(rows + others, inner, dtype=dtype, seed=1)
    whole = linear(x, packed)
    assert torch.equal(linear(x[:rows], packed), whole[:rows])
    assert torch.equal(linear(x[:1], packed), whole[:1])


def test_rows_of_a_wider_matrix_and_wide_outputs():
    wide = random(5, 300, dtype=torch.bfloat16, seed=0)
    weight = random(70, 100, dtype=torch.bfloat16, seed=1)
    out = linear(wide[:, 100:200], pack(weight, None), out_dtype=torch.float32)
    torch.testing.assert_close(out, wide[:, 100:200].float() @ weight.float().t(), rtol=1e-5, atol=1e-4)
