"""Products with weights: right in every dtype and for every number of rows, whichever way they are computed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import vlmserve_common.compute.linear as module
from tests.vlmserve_common.kernels.products import random
from vlmserve_common.compute.linear import Linear, Workspace, linear, share_workspace

torch.set_num_threads(1)
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.fixture
def no_native(monkeypatch):
    """A CPU without 16-bit products, whatever this one has."""
    monkeypatch.setattr(module, "has_native_products", lambda dtype: False)


@pytest.mark.usefixtures("no_native")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 5, 16, 17, 90])
@pytest.mark.parametrize(("inner", "outer"), [(64, 3), (48, 512), (33, 1100)])
def test_products_are_the_true_ones_rounded_once(dtype, bias, rows, inner, outer):
    x, weight = random(rows, inner, dtype=dtype, seed=0), random(outer, inner, dtype=dtype, seed=1)
    offset = random(outer, dtype=dtype, seed=2) if bias else None
    truth = x.double() @ weight.double().t() + (offset.double() if bias else 0)
    out = linear(x, weight, offset, Workspace())
    assert out.dtype == dtype
    assert out.shape == (rows, outer)
    error = (out.double() - truth).abs()
    assert (error <= ROUNDING[dtype] * truth.abs() + 1e-4).all()


@pytest.mark.usefixtures("no_native")
def test_many_rows_are_taken_in_parts(monkeypatch):
    monkeypatch.setattr(module, "MAX_COLUMNS", 32)
    x, weight = random(70, 24, dtype=torch.bfloat16, seed=0), random(40, 24, dtype=torch.bfloat16, seed=1)
    truth = x.float() @ weight.float().t()
    torch.testing.assert_close(linear(x, weight).float(), truth, rtol=2**-7, atol=1e-4)


@pytest.mark.usefixtures("no_native")
def test_rows_do_not_depend_on_their_neighbours():
    x, weight = random(40, 64, dtype=torch.bfloat16, seed=0), random(96, 64, dtype=torch.bfloat16, seed=1)
    whole = linear(x, weight)
    torch.testing.assert_close(linear(x[:7], weight), whole[:7], rtol=2**-7, atol=1e-3)


@pytest.mark.usefixtures("no_native")
def test_the_workspace_is_bounded_and_does_not_grow():
    workspace = Workspace()
    x, weight = random(20, 2048, dtype=torch.bfloat16, seed=0), random(3000, 2048, dtype=torch.bfloat16, seed=1)
    linear(x, weight, workspace=workspace)
    size = workspace.take(1, 1).untyped_storage().nbytes()
    assert size <= 4 * module.BLOCK_ELEMENTS
    for rows in (5, 200, 64):
        linear(x[:1].expand(rows, -1), weight[: rows * 5], workspace=workspace)
    assert workspace.take(1, 1).untyped_storage().nbytes() == size


def test_float32_is_left_to_torch(monkeypatch):
    monkeypatch.setattr(module, "_widened_linear", None)
    x, weight = random(20, 8, dtype=torch.float32, seed=0), random(6, 8, dtype=torch.float32, seed=1)
    torch.testing.assert_close(linear(x, weight), x @ weight.t())


@pytest.mark.parametrize(
    ("flags", "native"),
    [
        ({"architecture": "x86_64", "avx2": True, "avx512_bf16": False, "amx_bf16": False}, False),
        ({"architecture": "x86_64", "avx512_bf16": True}, True),
        ({"architecture": "x86_64", "amx_bf16": True}, True),
        ({"architecture": "x86_64", "avx512_fp16": True}, False),
        ({"architecture": "aarch64"}, True),
    ],
)
def test_native_products_are_used_where_the_cpu_has_them(monkeypatch, flags, native):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: flags)
    assert module.has_native_products.__wrapped__(torch.bfloat16) is native


def test_modules_share_one_workspace():
    layers = nn.Sequential(Linear(4, 4, bias=True), nn.Sequential(Linear(4, 2, bias=False)))
    share_workspace(layers)
    assert layers[0].workspace is layers[1][0].workspace is not None
