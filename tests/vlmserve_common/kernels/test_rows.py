"""Norms of rows: torch's in float64, rounded once; and the largest element of a row, the first of equal ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from vlmserve_common.kernels.rows import argmax, layer_norm, rms_norm

pytestmark = pytest.mark.usefixtures("operators")
SHAPES = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])


@SHAPES
@given(
    rows=st.sampled_from([1, 3, 40, 3000]),
    size=st.integers(1, 200),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_rms_norm(rows, size, dtype):
    generator = torch.Generator().manual_seed(rows * size)
    x, weight = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((rows, size), (size,)))
    wide = x.double()
    truth = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-6).double(), truth, rtol=2e-6 if dtype == torch.float32 else 2**-8, atol=1e-6
    )


@SHAPES
@given(
    rows=st.one_of(st.integers(1, 20), st.just(300)),
    size=st.one_of(st.integers(1, 70), st.sampled_from([192, 1024])),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    offset=st.sampled_from([0.0, 30.0]),
)
def test_layer_norm(rows, size, dtype, offset):
    generator = torch.Generator().manual_seed(rows * size)
    x = (torch.randn(rows, size, generator=generator) + offset).to(dtype)
    weight, bias = (torch.randn(size, generator=generator).to(dtype) for _ in range(2))
    out = layer_norm(x, weight, bias, 1e-6)
    expected = F.layer_norm(x.double(), (size,), weight.double(), bias.double(), 1e-6)
    assert out.dtype == dtype
    # in float32 a mean of 30 is known to about 3e-6, and a row of equal numbers has next to no deviation
    slack = 2e-5 * (1 + offset)
    rtol = 1e-5 if dtype == torch.float32 else 2**-8
    spread = x.double().var(-1, correction=0, keepdim=True).expand_as(out) > 1e-2
    torch.testing.assert_close(out.double()[spread], expected[spread], rtol=rtol, atol=slack)


@pytest.mark.parametrize("size", [1, 15, 16, 1000, 1024, 1025, 5000])
def test_where_the_largest_is(size):
    x = torch.randn(50, size, generator=torch.Generator().manual_seed(size))
    x[0] = -torch.inf
    x[1] = 3.0
    x[2, -1] = torch.inf
    assert torch.equal(argmax(x), x.argmax(dim=-1))


def test_the_first_of_equals_in_another_part():
    x = torch.zeros(1, 5000)
    x[0, 4000] = x[0, 2222] = x[0, 2223] = 1.0
    assert argmax(x).tolist() == [2222]
