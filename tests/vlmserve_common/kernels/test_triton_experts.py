"""Sparse MLPs in Triton against those in torch."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vlmserve_common.kernels.products import assert_routed
from tests.vlmserve_common.kernels.triton_device import DEVICE, seeded
from vlmserve_common.compute.activations import activation
from vlmserve_common.compute.expert_part import ExpertPart, part_of_experts
from vlmserve_common.compute.experts import Experts
from vlmserve_common.compute.fp8 import FP8, Blocks, ExpertScales

routing = pytest.importorskip("vlmserve_common.kernels.gpu.routing")
kernels = pytest.importorskip("vlmserve_common.kernels.gpu.experts")

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
CLOSE = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.float16: {"rtol": 5e-3, "atol": 5e-3},
    torch.bfloat16: {"rtol": 0.02, "atol": 0.04},
}


def by_torch(module: Experts, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Compute on the CPU, where torch does it expert by expert."""
    own = copy.deepcopy(module).cpu()
    return own(x.cpu(), (ids.long().cpu(), scores.cpu())).to(DEVICE)


@settings(max_examples=12)
@given(st.integers(0, 5), st.sampled_from([1, 5, 8, 33]), st.integers(1, 6), DTYPES, st.integers(0, 99))
def test_routing_is_torch_s(rows, experts, chosen, dtype, seed):
    chosen = min(chosen, experts)
    logits = 3 * seeded(seed, rows, experts, dtype=dtype)
    assert_routed(*routing.route(logits, chosen), logits)


def test_of_equally_likely_experts_the_first_are_chosen():
    ids, _ = routing.route(torch.zeros(2, 6, device=DEVICE), 3)
    assert ids.tolist() == [[0, 1, 2]] * 2


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_what_is_not_a_number_goes_to_experts_that_are_there():
    ids, _ = routing.route(torch.full((2, 5), float("nan"), device=DEVICE), 3)
    assert ((ids >= 0) & (ids < 5)).all()


@pytest.mark.slow
@settings(max_examples=10)
@given(
    st.one_of(st.integers(1, 40), st.just(700)),
    st.sampled_from([1, 3, 8, 20]),
    st.sampled_from([16, 64]),
    st.integers(0, 99),
)
def test_a_plan_has_each_row_once_in_a_block_of_its_expert(rows, experts, size, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, experts, (rows, 2), generator=generator, dtype=torch.int32)
    ids[: rows // 2] = 0  # one that is hit often
    plan = routing.make_plan(ids.to(DEVICE), experts, size)
    flat, seen = ids.flatten(), []
    for expert, first, count in plan.blocks.tolist():
        assert 0 <= count <= size
        if count:
            own = plan.order[first : first + count].tolist()
            assert (flat[own] == expert).all()
            seen += own
    assert sorted(seen) == list(range(2 * rows))
    assert plan.order.tolist() == flat.argsort(stable=True).tolist()


@settings(max_examples=12)
@given(
    tokens=st.sampled_from([0, 1, 2, 9]),
    experts=st.sampled_from([1, 4, 6]),
    chosen=st.integers(1, 3),
    sizes=st.sampled_from([(32, 48), (130, 40), (64, 40)]),
    inputs_first=st.booleans(),
    dtype=DTYPES,
    residual=st.booleans(),
    elsewhere=st.booleans(),
)
def test_what_torch_computes(tokens, experts, chosen, sizes, inputs_first, dtype, residual, elsewhere):
    chosen, (size, inner) = min(chosen, experts), sizes
    module = Experts(part_of_experts(experts, inner), size, activation("silu")).to(DEVICE, dtype)
    module.lay_out("inputs_first" if inputs_first else "outputs_first")
    for seed, weights in enumerate(module.weights):
        weights.copy_(seeded(seed, *weights.shape) * weights.shape[-1] ** -0.5)
    x, added = (seeded(seed, tokens, size, dtype=dtype) for seed in (2, 3))
    ids, scores = routing.route(seeded(4, tokens, experts, dtype=dtype), chosen)
    if elsewhere:  # experts that others have
        ids = torch.where(ids % 2 == 0, -1, ids)
    wanted = by_torch(module, x, ids, scores)
    found = kernels.run_experts(x, ids, scores, *module.weights, added if residual else None)
    assert found.dtype == dtype
    torch.testing.assert_close(found, wanted + added if residual else wanted, **CLOSE[dtype])


@pytest.mark.slow
@pytest.mark.parametrize("inputs_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_8_bit_floats(inputs_first, dtype):
    """Sizes that end within a block, of a part that begins in the midst of one."""
    whole, size = 192, 160
    part = ExpertPart(count=4, inner=whole, own=(1, 2, 3), first=96, size=96)
    module = Experts(part, size, activation("silu")).to(DEVICE, dtype)
    module.lay_out("inputs_first" if inputs_first else "outputs_first")
    scales = ExpertScales(part, size, (Blocks(outputs=128, inputs=128),) * 2).to(DEVICE)
    module.hold_fp8(scales)
    for seed, weights in enumerate(module.weights):
        weights.copy_(seeded(seed, *weights.shape).to(FP8))
    for seed, own in enumerate((scales.gate_up, scales.down)):
        own.copy_(seeded(seed, *own.shape).abs() * 0.05)
    x, ids, scores = seeded(2, 9, size, dtype=dtype), torch.tensor([[0, -1], [2, 1], [1, 0]] * 3), torch.rand(9, 2)
    ids, scores = ids.to(DEVICE), scores.to(DEVICE, dtype)
    wanted = by_torch(module, x, ids, scores)
    found = kernels.run_experts(x, ids.int(), scores, *module.weights, fp8=scales)
    torch.testing.assert_close(found, wanted, **CLOSE[dtype])


def test_tiles_hold_all_rows_of_any_number():
    """Each kind of tile, by the number of rows; of 16 bits."""
    module = Experts(part_of_experts(2, 32), 64, activation("silu")).to(DEVICE, torch.float16)
    for seed, weights in enumerate(module.weights):
        weights.copy_(seeded(seed, *weights.shape) * weights.shape[-1] ** -0.5)
    kinds = set()
    for tokens in (7, 50, 150):
        kinds.add(kernels.tile_for(2 * tokens, 2, torch.float16, gated=True).rows)
        x, ids = seeded(2, tokens, 64, dtype=torch.float16), torch.tensor([[1, 0]] * tokens, device=DEVICE)
        scores = torch.tensor([[0.75, 0.25]] * tokens, device=DEVICE, dtype=torch.float16)
        wanted = by_torch(module, x, ids, scores)
        torch.testing.assert_close(
            kernels.run_experts(x, ids.int(), scores, *module.weights), wanted, **CLOSE[torch.float16]
        )
    assert len(kinds) == 3
