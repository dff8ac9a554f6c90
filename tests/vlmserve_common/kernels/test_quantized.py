"""Quantised weights: rounded as well as can be, and products with them are those of the dequantised ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.vlmserve_common.kernels.products import random, random_quantized
from vlmserve_common.kernels.packed_linear import linear
from vlmserve_common.kernels.quantized import (
    INT4_GROUP,
    can_pack_quantized,
    can_quantize,
    merged,
    pack_quantized,
    quantize,
)

pytestmark = pytest.mark.usefixtures("operators")
SHAPES = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


@SHAPES
@given(outer=st.integers(1, 40), inner=st.integers(1, 300), dtype=DTYPES, seed=st.integers(0, 9))
def test_int8_rounds_to_the_nearest_of_a_scale_for_each_column(outer, inner, dtype, seed):
    weight = random(outer, inner, dtype=dtype, seed=seed).contiguous()
    made = quantize(weight, "int8")
    assert made.scales.shape == (outer, 1)
    assert (made.zeros == 128).all()
    torch.testing.assert_close(made.scales[:, 0].float(), weight.float().abs().amax(1) / 127, rtol=2**-11, atol=0)
    # the outermost may be beyond what the scale, rounded, reaches
    error = (made.dequantize() - weight.float()).abs()
    assert (error <= made.scales.float() * 0.57).all()


@SHAPES
@given(outer=st.integers(1, 20), inner=st.integers(1, 300), dtype=DTYPES, seed=st.integers(0, 9))
def test_int4_is_no_worse_than_the_whole_range_of_each_group(outer, inner, dtype, seed):
    weight = random(outer, inner, dtype=dtype, seed=seed) ** 3 + 0.5
    made = quantize(weight, "int4")
    assert made.numbers.max() <= 15
    for group, first in enumerate(range(0, inner, INT4_GROUP)):
        own = weight[:, first : first + INT4_GROUP].float()
        low, high = own.amin(1, keepdim=True).clamp(max=0), own.amax(1, keepdim=True).clamp(min=0)
        scale = ((high - low) / 15).half().float()
        zero = (-low / scale).round().clamp(0, 15)
        simple = (((own / scale).round() + zero).clamp(0, 15) - zero) * scale
        mine = made.dequantize()[:, first : first + INT4_GROUP]
        assert ((mine - own).square().sum(1) <= (simple - own).square().sum(1) * 1.0001).all(), group


def test_narrower_ranges_pay_where_few_weights_are_far_out():
    weight = random(64, INT4_GROUP, dtype=torch.float32, seed=0)
    weight[:, 0] = 6
    made = quantize(weight, "int4")
    whole = (weight.amax(1) - weight.amin(1)) / 15
    assert (made.scales[:, 0].float() < 0.97 * whole).float().mean() > 0.8


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_weights_of_nothing_but_zeros_stay_so(mode):
    made = quantize(torch.zeros(3, 40), mode)
    assert (made.dequantize() == 0).all()
    assert (linear(torch.ones(2, 40), pack_quantized(made, None, torch.float32)) == 0).all()


def test_weights_that_are_no_rows_in_memory():
    weight = random(48, 64, dtype=torch.bfloat16, seed=0).t()
    made = quantize(weight, "int8")
    assert torch.equal(made.numbers, quantize(weight.contiguous(), "int8").numbers)


def test_parts_below_one_another():
    parts = [random_quantized(outer, 64, 4, 32, outer, middle=False) for outer in (5, 70)]
    assert torch.equal(merged(parts).dequantize(), torch.cat([part.dequantize() for part in parts]))


def test_what_does_not_fit_the_layout_is_left_alone():
    assert can_quantize(torch.zeros(3, 16), "int4")
    assert not can_quantize(torch.zeros(3, 12), "int4")
    assert can_quantize(torch.zeros(3, 12), "int8")
    assert not can_quantize(torch.zeros(3, 12, dtype=torch.float16), "int8")
    assert can_pack_quantized(4, 24, 16)
    assert not can_pack_quantized(4, 20, 16)
    assert not can_pack_quantized(4, 24, 12)
