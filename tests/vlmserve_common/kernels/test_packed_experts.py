"""Sparse MLPs with packed weights: what a loop over tokens and experts computes; a token never depends on others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.vlmserve_common.kernels.products import assert_routed, random
from vlmserve_common.compute.activations import activation
from vlmserve_common.kernels.packed_linear import PackedWeight, pack, route, run_experts, stacked
from vlmserve_common.kernels.quantized import pack_quantized, quantize

pytestmark = pytest.mark.usefixtures("operators")
SHAPES = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 5e-6}, torch.bfloat16: {"rtol": 0.02, "atol": 0.04}}
ROWS = st.one_of(st.integers(0, 20), st.sampled_from([64, 400]))


def random_weights(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Whose products are about as large as what they are given."""
    return random(*shape, dtype=torch.float32, seed=seed).mul_(shape[-1] ** -0.5).to(dtype)


def packed(weights: torch.Tensor, mode: str | None, *, gated: bool) -> tuple[PackedWeight, torch.Tensor]:
    """Weights [experts, outputs, inputs] for the library, and as it has them, float64."""
    if mode is None:
        return stacked((pack(weight, None, gated=gated) for weight in weights), len(weights)), weights.double()
    made = [quantize(weight, mode) for weight in weights]
    plain = torch.stack([weight.dequantize() for weight in made]).double()
    return stacked((pack_quantized(weight, None, weights.dtype, gated=gated) for weight in made), len(made)), plain


def plain_loop(x, ids, scores, gate_up, down, act):
    """float64: token by token, expert by expert."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    for row in range(len(x)):
        for expert, score in zip(ids[row].tolist(), scores[row].double(), strict=True):
            gates, rest = (gate_up[expert] @ x[row].double()).chunk(2)
            out[row] += score * (down[expert] @ (activation(act)(gates) * rest))
    return out


@SHAPES
@given(
    rows=ROWS,
    experts=st.integers(1, 40),
    chosen=st.integers(1, 8),
    dtype=DTYPES,
    seed=st.integers(0, 99),
)
def test_routing_is_torch_s(rows, experts, chosen, dtype, seed):
    chosen = min(chosen, experts)
    logits = 3 * random(rows, experts, dtype=dtype, seed=seed)
    assert_routed(*route(logits, chosen), logits)


def test_of_equally_likely_experts_the_first_are_chosen():
    ids, scores = route(torch.zeros(2, 6), 3)
    assert ids.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(scores, torch.full((2, 3), 1 / 3))


def test_what_is_not_a_number_goes_to_experts_that_are_there():
    ids, _ = route(torch.full((2, 5), float("nan")), 3)
    assert ((ids >= 0) & (ids < 5)).all()


@SHAPES
@given(
    rows=ROWS,
    experts=st.integers(1, 9),
    chosen=st.integers(1, 4),
    inner=st.sampled_from([8, 64, 72, 136]),
    intermediate=st.sampled_from([8, 40, 64, 104]),
    dtype=DTYPES,
    mode=st.sampled_from([None, None, "int8", "int4"]),
    act=st.sampled_from(["silu", "gelu_pytorch_tanh"]),
    residual=st.booleans(),
    popular=st.booleans(),
)
def test_what_a_loop_computes(rows, experts, chosen, inner, intermediate, dtype, mode, act, residual, popular):
    chosen = min(chosen, experts)
    x = random(rows, inner, dtype=dtype, seed=0)
    gate_up, plain_gate_up = packed(
        random_weights(experts, 2 * intermediate, inner, dtype=dtype, seed=1), mode, gated=True
    )
    down, plain_down = packed(random_weights(experts, inner, intermediate, dtype=dtype, seed=2), mode, gated=False)
    logits = random(rows, experts, dtype=dtype, seed=3)
    if popular:  # all go through the same
        logits = logits[:1].expand(rows, -1).contiguous()
    ids, scores = route(logits, chosen)
    other = random(rows, inner, dtype=dtype, seed=4) if residual else None
    out = run_experts(x, ids, scores, gate_up, down, act=act, residual=other)
    assert out.dtype == dtype
    truth = plain_loop(x, ids, scores, plain_gate_up, plain_down, act)
    truth = truth if other is None else truth + other.double()
    torch.testing.assert_close(out.double(), truth, **CLOSE[dtype])


@SHAPES
@given(rows=st.integers(1, 9), others=st.sampled_from([0, 1, 30, 300]), dtype=DTYPES)
def test_a_token_is_the_same_in_every_batch(rows, others, dtype):
    gate_up, _ = packed(random_weights(6, 80, 96, dtype=dtype, seed=0), None, gated=True)
    down, _ = packed(random_weights(6, 96, 40, dtype=dtype, seed=1), None, gated=False)
    x, logits = random(rows + others, 96, dtype=dtype, seed=2), random(rows + others, 6, dtype=dtype, seed=3)
    ids, scores = route(logits, 3)
    whole = run_experts(x, ids, scores, gate_up, down, act="silu")
    few = run_experts(x[:rows], ids[:rows], scores[:rows], gate_up, down, act="silu")
    assert torch.equal(few, whole[:rows])
