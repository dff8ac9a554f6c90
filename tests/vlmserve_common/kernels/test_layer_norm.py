"""Layer normalisation: torch's in float64, rounded once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from vlmserve_common.kernels.norm import layer_norm

pytestmark = pytest.mark.usefixtures("operators")


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.one_of(st.integers(1, 20), st.just(300)),
    size=st.one_of(st.integers(1, 70), st.sampled_from([192, 1024])),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    offset=st.sampled_from([0.0, 30.0]),
)
def test_rows_are_the_true_ones_rounded_once(rows, size, dtype, offset):
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
