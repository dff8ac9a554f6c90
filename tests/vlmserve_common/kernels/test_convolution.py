"""Convolutions as products, beside torch's."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from vlmserve_common.compute.activations import activation
from vlmserve_common.compute.convolution import Convolution

pytestmark = pytest.mark.usefixtures("operators")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}


def convolution(channels: int, outputs: int, dims: int, stride: int, dtype: torch.dtype = torch.float32) -> Convolution:
    made = Convolution(channels, outputs, dims=dims, stride=stride).to(dtype)
    torch.manual_seed(0)
    assert made.weight is not None
    assert made.bias is not None
    made.weight.normal_(std=(channels * 3**dims) ** -0.5)
    made.bias.normal_()
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "stride"),
    [((3, 7), 1), ((2, 8), 2), ((1, 1), 2), ((5, 8, 6), 2), ((2, 5, 7), 2), ((2, 4, 4), 1), ((1, 1, 2), 2)],
)
@pytest.mark.parametrize("channels", [1, 6, 17])
def test_a_convolution_is_torchs(shape: tuple[int, ...], stride: int, channels: int, dtype: torch.dtype) -> None:
    dims = len(shape) - 1
    module = convolution(channels, 70, dims, stride, dtype)
    x = torch.randn(*shape, channels).to(dtype)
    function = F.conv1d if dims == 1 else F.conv2d
    assert module.weight is not None
    assert module.bias is not None
    wanted = function(x.double().movedim(-1, 1), module.weight.double(), module.bias.double(), stride, padding=1)
    wanted = F.gelu(wanted).movedim(1, -1)
    plain = module(x, activation("gelu"))
    module.pack()
    assert module.packed is not None
    for found in (plain, module(x, activation("gelu"))):
        torch.testing.assert_close(found.double(), wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_chunk_does_not_depend_on_others() -> None:
    module = convolution(8, 64, 2, 2)
    module.pack()
    x = torch.randn(9, 40, 30, 8)
    torch.testing.assert_close(module(x)[7:8], module(x[7:8]), atol=0, rtol=0)
