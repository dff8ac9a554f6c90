"""Products of whole numbers of 8 bits: those of a reference in numpy; a row depends on no other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.vlmserve_common.kernels.products import random, true_product
from vlmserve_common.compute.linear import pack_weight
from vlmserve_common.kernels.library import multiplies_bytes
from vlmserve_common.kernels.packed_linear import linear
from vlmserve_common.kernels.quantized import quantize

GROUP = 128


@pytest.fixture(autouse=True)
def _bytes(operators):
    if not multiplies_bytes():
        pytest.skip(f"{operators} does not multiply bytes")


def reference(x: torch.Tensor, weight: torch.Tensor) -> np.ndarray:
    """The product with sums of whole numbers in int64, scaled in float32."""
    made = quantize(weight, "w8a8")
    numbers = made.numbers.numpy().astype(np.int64) - 128
    wide, total = x.float().numpy(), np.zeros((len(x), len(weight)), np.float32)
    for first in range(0, x.shape[1], GROUP):
        part = wide[:, first : first + GROUP]
        far = np.where(np.abs(part) > 6 * np.abs(part).mean(1, keepdims=True), part, 0)
        part = part - far
        scale = np.abs(part).max(1, keepdims=True) / np.float32(127)
        inverse = np.divide(np.float32(1), scale, where=scale > 0, out=np.zeros_like(scale))
        whole = np.rint(part * inverse).astype(np.int64)
        total = total + scale * (whole @ numbers[:, first : first + GROUP].T).astype(np.float32)
        total = total + far @ numbers[:, first : first + GROUP].T.astype(np.float32)
    return total * made.scales.float().numpy().T


@pytest.mark.parametrize("rows", [1, 5, 7, 191, 193])
@pytest.mark.parametrize(("inner", "outer"), [(4, 1), (100, 70), (128, 64), (260, 130), (1024, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_whole_numbers(rows, inner, outer, dtype):
    x, weight = random(rows, inner, dtype=dtype, seed=0), random(outer, inner, dtype=dtype, seed=1)
    x[0] = 0
    out = linear(x, pack_weight(weight, None, "w8a8"), out_dtype=torch.float32).numpy()
    expected = reference(x, weight)
    if inner <= GROUP:  # one sum, without rounding
        np.testing.assert_array_equal(out, expected)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


def test_what_follows_a_product_is_as_for_other_weights():
    x, weight = random(40, 256, dtype=torch.float32, seed=0), random(140, 256, dtype=torch.float32, seed=1)
    bias, other = random(140, dtype=torch.float32, seed=2), random(40, 70, dtype=torch.float32, seed=3)
    out = linear(x, pack_weight(weight, bias, "w8a8", gated=True), act="silu", residual=other)
    truth = true_product(x, weight, bias, other, act="silu", gated=True)
    assert 1e-4 < (out - truth).norm() / truth.norm() < 0.02


@pytest.mark.parametrize("rows", [1, 6, 16, 100, 250])
def test_a_row_is_the_same_in_every_batch(rows):
    packed = pack_weight(random(200, 300, dtype=torch.bfloat16, seed=0), None, "w8a8")
    x = random(400, 300, dtype=torch.bfloat16, seed=1)
    x[:, ::50] *= 20
    x[300:] *= 1000
    assert torch.equal(linear(x[:rows], packed), linear(x, packed)[:rows])


@pytest.mark.parametrize("rows", [3, 50])
def test_inputs_that_are_far_out_cost_others_no_accuracy(rows):
    x, weight = random(rows, 1024, dtype=torch.float32, seed=0), random(64, 1024, dtype=torch.float32, seed=1)
    channels = torch.arange(5, 1024, 70)
    x[:, channels] *= 100
    weight[:, channels] /= 100
    made = quantize(weight, "w8a8").dequantize()
    truth = x.double() @ made.double().t()
    error = (linear(x, pack_weight(weight, None, "w8a8")) - truth).norm() / truth.norm()
    assert error < 0.01  # with these in the groups: 0.2
    np.testing.assert_allclose(linear(x, pack_weight(weight, None, "w8a8")), reference(x, weight), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_not_hidden(bad):
    x = random(8, 256, dtype=torch.bfloat16, seed=0)
    x[3, 200] = bad
    out = linear(x, pack_weight(random(64, 256, dtype=torch.bfloat16, seed=1), None, "w8a8"))
    assert not out[3].isfinite().any()
    assert out[[0, 1, 2, 4, 5, 6, 7]].isfinite().all()
