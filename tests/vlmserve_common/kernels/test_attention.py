"""Paged attention, and what comes before it: as torch has it in float64, for all shapes; a query's is its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.vlmserve_common.kernels.paged_step import PagedStep, make_step
from vlmserve.memory.kv_cache import KVCache
from vlmserve.models.attention.base import Projected, positioned
from vlmserve_common.compute.rotary import rotation
from vlmserve_common.kernels import library
from vlmserve_common.kernels.attention import HeadNorms, attend, can_attend, write_kv

pytestmark = pytest.mark.usefixtures("operators")
SHAPES = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
STORED = [None, torch.float8_e4m3fn, torch.int8]  # None: what queries are of
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7}
PAST = st.one_of(st.integers(0, 130), st.sampled_from([511, 512, 1100]))
NEW = st.one_of(st.just(1), st.integers(1, 20), st.sampled_from([65, 130]))
REQUESTS = st.lists(st.tuples(PAST, NEW), min_size=1, max_size=4)
HEADS = st.sampled_from([(1, 1), (3, 1), (4, 2), (14, 2), (6, 6)])
WINDOWS = st.sampled_from([0, 0, 1, 7, 64, 100, 512, 2000])
DIMS = st.sampled_from([16, 32, 48, 64, 80, 128, 256])


def attended(step: PagedStep, scale: float, window: int) -> torch.Tensor:
    """Compute a step by the operator, [N, heads * dim]."""
    past, new = torch.tensor(step.lengths).T
    requests = torch.stack((step.req_pool_indices, past, new, step.starts[:-1].long()), dim=1)
    return attend(step.qkv, scale, requests, step.table, step.layer, window)


def on_the_cpu(lengths, heads, dim, dtype, stored, seed) -> PagedStep:
    return make_step(lengths, heads=heads, dim=dim, dtype=dtype, stored=stored, seed=seed, device=CPU)


@SHAPES
@given(REQUESTS, HEADS, DIMS, st.sampled_from(DTYPES), st.sampled_from(STORED), WINDOWS, st.integers(0, 9))
def test_attention_is_the_true_one(lengths, heads, dim, dtype, stored, window, seed):
    step, scale = on_the_cpu(lengths, heads, dim, dtype, stored, seed), 2 * dim**-0.5
    out = attended(step, scale, window)
    assert out.dtype == dtype
    # sharp weights: a score of 30 is rounded by 2e-6, and its weight by as much of itself
    tolerance = max(TOLERANCE[dtype], 1e-5)
    torch.testing.assert_close(
        out.double(), step.truth(scale, window=window).flatten(1), rtol=tolerance, atol=2 * tolerance
    )


@SHAPES
@given(REQUESTS, HEADS, DIMS, st.sampled_from(DTYPES), st.sampled_from(STORED), WINDOWS, st.integers(0, 9))
def test_a_token_in_a_step_of_its_own_is_the_same_bit_for_bit(lengths, heads, dim, dtype, stored, window, seed):
    """Whatever batch mates, chunks and threads."""
    step = on_the_cpu(lengths, heads, dim, dtype, stored, seed)
    out = attended(step, 0.4, window)
    last = [(request, new - 1) for request, (_, new) in enumerate(lengths)]
    for request, token in [*last, (0, 0)]:
        place = int(step.starts[request]) + token
        alone = replace(
            step.alone(request),
            lengths=[(lengths[request][0] + token, 1)],
            qkv=step.qkv[place : place + 1],
            starts=torch.tensor([0, 1], dtype=torch.int32),
        )
        assert torch.equal(attended(alone, 0.4, window)[0], out[place])
    library.active().vs_configure(1, 50)
    try:
        assert torch.equal(attended(step, 0.4, window), out)
    finally:
        library.active().vs_configure(2, 50)


@SHAPES
@given(
    st.integers(1, 20), HEADS, DIMS, st.sampled_from(DTYPES), st.sampled_from(STORED), st.booleans(), st.integers(0, 9)
)
def test_queries_are_placed_and_keys_and_values_stored(tokens, heads, dim, dtype, stored, normalised, seed):
    """Rounded once: in bfloat16 nearer to float64 than torch, which rounds in between."""
    heads, kv_heads = heads
    generator = torch.Generator().manual_seed(seed)
    qkv = (torch.randn(tokens, heads + 2 * kv_heads, dim, generator=generator) * 3).to(dtype)
    norms = None
    if normalised:
        q_weight, k_weight = (torch.randn(dim, generator=generator).to(dtype) for _ in range(2))
        norms = HeadNorms(q_weight=q_weight, k_weight=k_weight, eps=1e-6)
    rotary = rotation(torch.rand(tokens, dim // 2, generator=generator) * 6, dtype)
    wide = None if norms is None else HeadNorms(q_weight=q_weight.double(), k_weight=k_weight.double(), eps=1e-6)
    truth = positioned(Projected(qkv.double(), tuple(part.double() for part in rotary), wide), kv_heads)
    slots = torch.randperm(tokens + 5, generator=generator)[:tokens]
    caches = [
        KVCache(
            num_slots=tokens + 5, num_layers=1, num_kv_heads=kv_heads, head_dim=dim, dtype=stored or dtype, device=CPU
        )
        for _ in range(2)
    ]
    caches[1].write(0, slots, truth[1].float() if stored else truth[1].to(dtype), truth[2].to(dtype))
    write_kv(qkv, *rotary, norms, slots, caches[0].layers[0])
    torch.testing.assert_close(
        qkv[:, :heads].double(), truth[0], rtol=2**-8 if dtype != torch.float32 else 2e-6, atol=1e-5
    )
    step = {torch.float8_e4m3fn: 2**-3, torch.int8: 0.02}.get(stored, TOLERANCE[dtype])
    for got, want in zip(caches[0].read(0, slots, torch.float64), caches[1].read(0, slots, torch.float64), strict=True):
        # a hair's difference may round to the neighbour
        torch.testing.assert_close(got, want, rtol=step, atol=step * float(want.abs().max()) / 10 + 1e-5)
        if stored:
            assert ((got - want).abs() > 1e-4 * want.abs().max()).double().mean() < 0.02
    untouched = torch.ones(tokens + 5, dtype=torch.bool).index_fill(0, slots, False)
    assert not caches[0].layers[0].keys[untouched].float().any()


def test_eight_bits_are_those_of_torch():
    """Every float8, all that lies between two, what is too large, and zeros."""
    e4m3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    e4m3 = e4m3[e4m3.isfinite()].sort().values
    between = torch.cat([e4m3[:-1] * (1 - x) + e4m3[1:] * x for x in (0.0, 0.499, 0.5, 0.501, 0.999)])
    values = torch.cat([between, torch.tensor([448.0, 465.0, 1e6, -1e6, 1e-9, -0.0])])
    values = torch.cat([values, torch.zeros(-len(values) % 16)]).view(-1, 1, 16)
    unturned = rotation(torch.zeros(len(values), 8), torch.float32)
    slots = torch.arange(len(values))
    for dtype in (torch.float8_e4m3fn, torch.int8):
        ours, theirs = (
            KVCache(num_slots=len(values), num_layers=1, num_kv_heads=1, head_dim=16, dtype=dtype, device=CPU)
            for _ in range(2)
        )
        write_kv(values.repeat(1, 3, 1), *unturned, None, slots, ours.layers[0])
        stored = theirs.write(0, slots, values, values)
        for got, want in zip(ours.read(0, slots, torch.float32), stored, strict=True):
            assert torch.equal(got, want)


def test_what_cannot_be_attended():
    assert can_attend(torch.bfloat16, torch.int8, 128)
    assert not can_attend(torch.bfloat16, torch.float32, 128)
    assert not can_attend(torch.float16, torch.float16, 128)
    assert not can_attend(torch.bfloat16, torch.bfloat16, 72)
    assert not can_attend(torch.bfloat16, torch.bfloat16, 272)
