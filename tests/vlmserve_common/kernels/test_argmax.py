"""The largest of a row, and of equals the first."""

from __future__ import annotations

import pytest
import torch

from vlmserve_common.kernels.argmax import argmax

pytestmark = pytest.mark.usefixtures("operators")


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
