"""Products with weights: right in every dtype and for every number of rows, whichever way they are computed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import vlmserve_common.compute.linear as module
from vlmserve_common.compute.activations import activation
from vlmserve_common.compute.linear import Linear, MergedLinear, PatchProjection, Workspace, linear, share_workspace

torch.set_num_threads(1)
ROUNDING = {torch.bfloat16: 2**-8, torch.float16: 2**-11}


def random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Normal numbers, seeded."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


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
def test_leading_dimensions_are_kept():
    x, weight = random(2, 3, 5, 8, dtype=torch.bfloat16, seed=0), random(6, 8, dtype=torch.bfloat16, seed=1)
    assert linear(x, weight).shape == (2, 3, 5, 6)
    assert linear(x[:0], weight).shape == (0, 3, 5, 6)


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


@pytest.mark.parametrize("act", [None, "gelu", "gelu_pytorch_tanh", "quick_gelu"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 600])
def test_an_activation_follows_the_product(rows, bias, act):
    x, weight = random(rows, 48, dtype=torch.bfloat16, seed=0), random(40, 48, dtype=torch.bfloat16, seed=1) / 8
    offset = random(40, dtype=torch.bfloat16, seed=2) if bias else None
    function = activation(act) if act else None
    truth = x.double() @ weight.double().t() + (offset.double() if bias else 0)
    truth = truth if function is None else function(truth)
    out = linear(x.view(1, rows, 48), weight, offset, act=function)
    assert out.shape == (1, rows, 40)
    # rounded before and after the activation
    torch.testing.assert_close(out[0].double(), truth, rtol=2**-7, atol=2**-7)


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


def test_merged_layers_are_stored_under_the_names_of_their_parts():
    layer = MergedLinear(3, {"q_proj": 2, "k_proj": 1}, bias=True)
    layer.weight.copy_(torch.arange(9.0).view(3, 3))
    layer.bias.copy_(torch.tensor([1.0, 2.0, 3.0]))
    parts = dict(layer.stored_parameters("layers.0.self_attn.qkv_proj"))
    assert {name: value.tolist() for name, value in parts.items()} == {
        "layers.0.self_attn.q_proj.weight": [[0, 1, 2], [3, 4, 5]],
        "layers.0.self_attn.k_proj.weight": [[6, 7, 8]],
        "layers.0.self_attn.q_proj.bias": [1, 2],
        "layers.0.self_attn.k_proj.bias": [3],
    }


def test_patch_projections_are_stored_as_convolutions():
    layer = PatchProjection((3, 2, 4, 4), 5, bias=False)
    layer.weight.copy_(random(5, 96, dtype=torch.float32, seed=0))
    [(name, kernel)] = layer.stored_parameters("proj")
    assert name == "proj.weight"
    assert kernel.shape == (5, 3, 2, 4, 4)
    patches = random(7, 3, 2, 4, 4, dtype=torch.float32, seed=1)
    expected = nn.functional.conv3d(patches, kernel)[:, :, 0, 0, 0]
    torch.testing.assert_close(layer(patches.flatten(1)), expected)
