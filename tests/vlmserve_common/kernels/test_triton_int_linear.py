"""Products with whole numbers of a few bits in Triton against those of the dequantised numbers in torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fake_cuda.engine import move
from tests.fake_cuda.tensors import CUDA, CudaTensor, FakeCuda
from tests.vlmserve_common.kernels.triton_device import DEVICE, DTYPES, seeded
from vlmserve_common.compute.activations import activation
from vlmserve_common.compute.expert_part import part_of_experts
from vlmserve_common.compute.experts import Experts
from vlmserve_common.compute.int_weights import ExpertInts, IntForm, IntWeights
from vlmserve_common.compute.linear import Linear
from vlmserve_common.kernels import fused
from vlmserve_common.kernels.quantized import QuantizedWeight

kernels = pytest.importorskip("vlmserve_common.kernels.gpu.int_linear")
grouped = pytest.importorskip("vlmserve_common.kernels.gpu.experts")

CLOSE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 5e-3, "atol": 5e-3},
    torch.bfloat16: {"rtol": 0.02, "atol": 0.02},
}


def random_numbers(form: IntForm, seed: int) -> QuantizedWeight:
    """Numbers whose products are about as large as what they are given."""
    generator, largest = torch.Generator().manual_seed(seed), 2.0**-form.bits * form.inner**-0.5

    def whole(*shape: int, below: int) -> torch.Tensor:
        return torch.randint(0, below, shape, generator=generator)

    return QuantizedWeight(
        numbers=whole(form.outer, form.inner, below=2**form.bits).to(torch.uint8),
        scales=((0.5 + torch.rand(form.outer, form.groups, generator=generator)) * largest).half(),
        zeros=whole(form.outer, form.groups, below=2**form.bits + 1).short(),  # GPTQ's may be one more than numbers
        bits=form.bits,
        group=form.group,
    )


def form_of(outer: int, inner: int, bits: int, group: int, dtype: torch.dtype = torch.float32) -> IntForm:
    return IntForm(outer=outer, inner=inner, bits=bits, group=group, dtype=dtype)


def filled(form: IntForm, count: int = 1) -> IntWeights:
    weights = IntWeights(form, count).to(DEVICE)
    for index in range(count):
        weights.fill(index, random_numbers(form, index))
    return weights


@pytest.mark.parametrize(
    ("bits", "inner", "group"), [(4, 96, 32), (8, 48, 16), (4, 256, 128), (4, 96, 96), (8, 80, 64)]
)
def test_nothing_is_lost_when_numbers_are_stored(bits, inner, group):
    form = form_of(5, inner, bits, group)
    weights = filled(form, 2)
    assert weights.numbers.nbytes == 2 * 5 * inner * bits // 8
    for index in range(2):
        wanted = random_numbers(form, index).dequantize()
        assert torch.equal(weights.dequantized(index, torch.float32).cpu(), wanted)


@settings(max_examples=15)
@given(
    total=st.sampled_from([0, 1, 3, 16, 17, 70, 130]),
    outer=st.sampled_from([8, 40, 64, 130]),
    sizes=st.sampled_from([(4, 96, 32), (4, 256, 128), (4, 96, 96), (4, 160, 128), (8, 48, 16), (8, 80, 64)]),
    dtype=st.sampled_from(DTYPES),
    bias=st.booleans(),
)
def test_products_are_those_of_the_dequantised_numbers(total, outer, sizes, dtype, bias):
    bits, inner, group = sizes
    weights = filled(form_of(outer, inner, bits, group, dtype), 2)
    x = seeded(3, total, inner, dtype=dtype)
    offset = seeded(4, outer, dtype=dtype) if bias else None
    found = kernels.int_linear(x, weights, offset, index=1)
    wanted = x.float() @ weights.dequantized(1, torch.float32).t() + (0 if offset is None else offset.float())
    assert found.dtype == dtype
    torch.testing.assert_close(found, wanted.to(dtype), **CLOSE[dtype])


def test_a_row_never_depends_on_other_rows_of_its_tile():
    weights = filled(form_of(70, 128, 4, 64))
    x = seeded(1, 16, 128)
    together = kernels.int_linear(x, weights, None)
    assert torch.equal(together[5:6], kernels.int_linear(x[5:6].contiguous(), weights, None))


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # rows of experts elsewhere are never written
@settings(max_examples=8)
@given(
    tokens=st.sampled_from([0, 1, 2, 9, 40]),
    sizes=st.sampled_from([(4, 64, 96, 32), (4, 128, 32, 128), (8, 48, 80, 16), (4, 96, 64, 64)]),
    dtype=st.sampled_from(DTYPES),
    residual=st.booleans(),
    elsewhere=st.booleans(),
)
def test_experts_are_those_of_the_dequantised_numbers(tokens, sizes, dtype, residual, elsewhere):
    bits, size, inner, group = sizes
    experts, chosen = 4, 2
    module = Experts(part_of_experts(experts, inner), size, activation("silu")).to(DEVICE, dtype)
    gate_up = filled(form_of(2 * inner, size, bits, group, dtype), experts)
    down = filled(form_of(size, inner, bits, group, dtype), experts)
    for weights, ints in zip(module.weights, (gate_up, down), strict=True):
        for slot in range(experts):
            weights[slot] = ints.dequantized(slot, dtype)
    x, added = (seeded(seed, tokens, size, dtype=dtype) for seed in (2, 3))
    ids = torch.randint(0, experts, (tokens, chosen), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    if elsewhere:
        ids = torch.where(ids % 2 == 0, -1, ids)
    scores = torch.rand(tokens, chosen, generator=torch.Generator().manual_seed(2)).to(DEVICE, dtype)
    wanted = module.cpu()(x.cpu(), (ids.cpu(), scores.cpu())).to(DEVICE)
    found = grouped.run_experts(x, ids.int(), scores, gate_up, down, added if residual else None)
    torch.testing.assert_close(found, wanted + added if residual else wanted, **CLOSE[dtype])


def test_a_product_takes_no_other_way_where_the_kernels_are_active(monkeypatch):
    """Also of a slice of what was computed before, whose rows have strides."""
    form = form_of(64, 96, 4, 32)
    x = seeded(1, 3, 128)[:, :96]
    layer = Linear(96, 64, bias=True).to(DEVICE)
    layer.bias.copy_(seeded(2, 64))
    layer.hold_ints(filled(form))
    by_torch = layer(x)
    fused.activate("triton", DEVICE)
    monkeypatch.setattr(IntWeights, "dequantized", None)
    torch.testing.assert_close(layer(x), by_torch, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "device", "way"),
    [
        ((4, 96, 32), "cpu", "triton"),
        ((4, 96, 16), "cpu", None),  # a step of 16 inputs has 8 bytes
        ((8, 96, 16), "cpu", "triton"),
        ((4, 48, 128), "cpu", None),
        ((4, 96, 128), "cpu", "triton"),
        ((4, 96, 32), "meta", None),
    ],
)
def test_what_a_kernel_takes(sizes, device, way):
    bits, inner, group = sizes
    form = form_of(8, inner, bits, group, torch.bfloat16)
    assert form.way(torch.device(device)) is None
    fused.activate("triton", torch.device("cpu"))
    assert form.way(torch.device(device)) == way


def test_experts_that_adapters_change_are_computed_one_by_one():
    form = form_of(64, 64, 4, 32)
    gate_up, down = (
        filled(form_of(128, 64, 4, 32), 3),
        filled(form, 3),
    )
    module = Experts(part_of_experts(3, 64), 64, activation("silu")).to(DEVICE)
    module.hold_ints(ExpertInts(gate_up, down))
    x, ids, scores = seeded(1, 4, 64), torch.tensor([[0, 2], [1, 0], [2, 1], [2, -1]], device=DEVICE), seeded(5, 4, 2)
    grouped_sum = grouped.run_experts(x, ids.int(), scores, gate_up, down)
    torch.testing.assert_close(module._one_by_one(x, ids, scores, None), grouped_sum, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="counts by a GPU that is not there")
def test_a_product_is_one_launch_and_experts_are_four_and_nothing_waits():
    """So that a graph can hold them."""
    layer = Linear(96, 64, bias=True)
    layer.hold_ints(filled(form_of(64, 96, 4, 32)))
    experts = Experts(part_of_experts(3, 64), 64, activation("silu"))
    sizes = (form_of(128, 64, 4, 32), form_of(64, 64, 4, 32))
    experts.hold_ints(ExpertInts(*(filled(form, 3) for form in sizes)))
    ids, scores = torch.tensor([[0, 2], [1, 0]]), seeded(5, 2, 2)
    with FakeCuda() as cuda:
        fused.activate("triton", CUDA)
        move(layer)
        move(experts)
        with cuda.counting() as one:
            layer(CudaTensor(seeded(1, 2, 96)))
        with cuda.counting() as four:
            experts(CudaTensor(seeded(1, 2, 64)), (CudaTensor(ids.int()), CudaTensor(scores)))
    assert one.launches == {"int_linear_kernel": 1}
    assert four.launches == {"plan_kernel": 1, "int_grouped_kernel": 2, "sum_kernel": 1}
    assert not one.syncs
    assert not four.syncs
