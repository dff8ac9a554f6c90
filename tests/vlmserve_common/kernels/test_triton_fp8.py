"""Products of 8-bit floats, by the kernels under Triton's interpreter, against the same in float32 by torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.vlmserve_common.kernels.triton_device import DEVICE, DTYPES
from vlmserve_common.compute.fp8 import FP8, Fp8Scales, quantize, scaled_product
from vlmserve_common.kernels.gpu import fp8 as kernels


@pytest.mark.slow
@settings(max_examples=25)
@given(
    rows=st.integers(1, 20),
    inner=st.integers(1, 400),
    whole=st.booleans(),
    size=st.sampled_from([1e-30, 1e-3, 1.0, 1e4]),
    dtype=st.sampled_from(DTYPES),
)
@example(rows=3, inner=129, whole=False, size=1.0, dtype=torch.bfloat16)
def test_inputs_are_rounded_as_by_torch(rows, inner, whole, size, dtype):
    x = (torch.randn(rows, inner + 3, generator=torch.Generator().manual_seed(inner)) * size).to(DEVICE, dtype)[
        :, :inner
    ]
    group = inner if whole else 128
    numbers, scales = kernels.quantize(x, group)
    expected, expected_scales = quantize(x, group)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(numbers.float(), expected.float())


def test_every_number_and_what_is_between_is_rounded_to_the_nearest():
    all_numbers = torch.arange(256, dtype=torch.uint8).view(FP8).float()
    numbers = all_numbers[all_numbers.isfinite()].sort().values
    between = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2, torch.linspace(-500, 500, 3001)])
    given_scale = torch.ones(1, device=DEVICE)
    made, _ = kernels.quantize(between[None].to(DEVICE), len(between), given_scale)
    assert torch.equal(made[0].float().cpu(), between.clamp(-448, 448).to(FP8).float())


def test_a_given_scale_is_for_all():
    x, scale = (
        torch.randn(3, 200, generator=torch.Generator().manual_seed(0)).to(DEVICE),
        torch.tensor([0.004]).to(DEVICE),
    )
    numbers, scales = kernels.quantize(x, 200, scale)
    expected, expected_scales = quantize(x, 200, scale)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(numbers.float(), expected.float())
    assert (numbers.float().abs() == 448).any()


@pytest.mark.parametrize("dtype", [DTYPES[1], *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in DTYPES[::2])])
@pytest.mark.parametrize(
    ("total", "outer", "inner", "rows", "bias"),
    [
        (1, 40, 128, 128, False),
        (3, 200, 300, 128, True),
        (16, 33, 256, 1, True),
        (17, 130, 130, 128, False),
        (70, 70, 257, 1, True),
        (130, 260, 128, 128, True),
    ],
)
def test_products_are_those_of_the_same_numbers_in_float32(total, outer, inner, rows, bias, dtype):
    generator = torch.Generator().manual_seed(outer)
    x = torch.randn(total, inner, generator=generator).to(DEVICE, dtype)
    weight = (torch.randn(outer, inner, generator=generator) * 100).to(FP8).to(DEVICE)
    offset = torch.randn(outer, generator=generator).to(DEVICE, dtype) if bias else None
    scales = Fp8Scales((outer, inner), rows, 128, "group", dtype).to(DEVICE)
    scales.weights.copy_(torch.rand(scales.weights.shape, generator=generator) * 0.01)
    made = kernels.block_linear(x, weight, scales.weights, offset, rows=rows)
    assert made.dtype == dtype
    expected = scales.emulated(x, weight, offset)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(made.float(), expected.float(), rtol=tolerance, atol=tolerance * 10)


def test_a_row_of_zeros_and_a_row_of_huge_numbers_are_finite():
    x = torch.stack([torch.zeros(128), torch.full((128,), 3e38)]).to(DEVICE)
    numbers, scales = kernels.quantize(x, 128)
    assert not numbers[0].float().any()
    assert torch.equal(numbers[1].float(), torch.full((128,), 448.0, device=DEVICE))
    assert scales.isfinite().all()


@pytest.mark.parametrize("bias", [False, True])
def test_products_of_rows_with_a_scale_each(bias):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 64, generator=generator).to(DEVICE, torch.bfloat16)
    weight = (torch.randn(48, 64, generator=generator) * 100).to(FP8).to(DEVICE)
    offset = torch.randn(48, generator=generator).to(DEVICE, torch.bfloat16) if bias else None
    scales = Fp8Scales((48, 64), 1, 64, "token", torch.bfloat16).to(DEVICE)
    scales.weights.copy_(torch.rand(48, 1, generator=generator) * 0.01)
    numbers, own = kernels.quantize(x, 64)
    made = scaled_product(numbers, own, weight, scales.weights, offset, torch.bfloat16)
    torch.testing.assert_close(made, scales.emulated(x, weight, offset), rtol=2**-7, atol=0.05)
