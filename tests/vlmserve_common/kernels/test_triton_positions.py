"""Heads normalised, turned and stored in one launch, against torch in many."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vlmserve_common.kernels.triton_device import DEVICE, DTYPES, assert_rounded_alike, seeded
from vlmserve.memory.kv_cache import KVCache
from vlmserve.models.attention.base import Projected, positioned
from vlmserve_common.compute.rotary import rotation
from vlmserve_common.kernels.attention import HeadNorms

positions = pytest.importorskip("vlmserve_common.kernels.gpu.positions")
SLOTS, POISON = 64, 77


def poisoned(kv_heads, dim, dtype):
    cache = KVCache(num_slots=SLOTS, num_layers=1, num_kv_heads=kv_heads, head_dim=dim, dtype=dtype, device=DEVICE)
    layer = cache.layers[0]
    for tensor in (layer.keys, layer.values, layer.key_scales, layer.value_scales):
        if tensor is not None:
            tensor.view(torch.uint8).fill_(POISON)
    return cache


def case(tokens, heads, kv_heads, dim, dtype, normed, seed):
    """What is given, and slots."""
    norms = None
    if normed:
        norms = HeadNorms(q_weight=1 + seeded(3, dim, dtype=dtype), k_weight=1 - seeded(4, dim, dtype=dtype), eps=1e-6)
    order = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(seed))
    qkv = seeded(seed, tokens, heads + 2 * kv_heads, dim, dtype=dtype)
    return Projected(qkv, rotation(3 * seeded(seed + 1, tokens, dim // 2), dtype), norms), order[:tokens].to(DEVICE)


def both(own, slots, kv_heads, cache_dtype):
    """Queries and caches by the kernel and by torch."""
    found, wanted = (poisoned(kv_heads, own.qkv.shape[-1], cache_dtype) for _ in range(2))
    q, k, v = positioned(dataclasses.replace(own, qkv=own.qkv.clone()), kv_heads)
    wanted.write(0, slots, k, v)
    layer = found.layers[0]
    assert positions.can_store(own.qkv, layer)
    made = positions.position_and_store(own.qkv, own.rotary, own.norms, slots, layer)
    assert made.is_contiguous()
    return made, q, layer, wanted.layers[0]


@settings(max_examples=10)
@given(
    st.sampled_from([0, 1, 7, 8, 9, 19]),
    st.sampled_from([(1, 1), (3, 1), (4, 2)]),
    st.sampled_from([2, 16, 40, 64, 80]),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.integers(0, 99),
)
def test_in_the_models_own_dtype(tokens, heads, dim, dtype, normed, seed):
    own, slots = case(tokens, *heads, dim, dtype, normed, seed)
    q, wanted_q, found, wanted = both(own, slots, heads[1], dtype)
    assert_rounded_alike(q, wanted_q)
    assert_rounded_alike(found.keys[slots], wanted.keys[slots])
    assert torch.equal(found.values, wanted.values)  # and nothing else was written
    others = torch.ones(SLOTS, dtype=torch.bool, device=DEVICE)
    others[slots] = False
    assert torch.equal(found.keys[others], wanted.keys[others])


@pytest.mark.slow
@settings(max_examples=10)
@given(
    st.sampled_from([1, 9]),
    st.sampled_from([16, 40]),
    st.sampled_from(DTYPES),
    st.sampled_from([torch.float8_e4m3fn, torch.int8]),
    st.sampled_from([1e-3, 1.0, 300.0]),
    st.integers(0, 99),
)
def test_in_eight_bits(tokens, dim, dtype, cache_dtype, size, seed):
    """Not normalised, so that what is stored is equal to the bit: small numbers, those beyond the largest, zeros."""
    own, slots = case(tokens, 2, 2, dim, dtype, False, seed)
    own.qkv.mul_(size)[0, -1] = 0
    _, _, found, wanted = both(own, slots, 2, cache_dtype)
    for name in ("keys", "values"):
        assert torch.equal(getattr(found, name).view(torch.uint8), getattr(wanted, name).view(torch.uint8)), name
    if cache_dtype == torch.int8:
        assert torch.equal(found.key_scales, wanted.key_scales)
        assert torch.equal(found.value_scales, wanted.value_scales)


def test_every_float_of_eight_bits_and_the_middles_between_them():
    """Ties go to the even one; beyond 448 it is 448."""
    finite = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    finite = finite[finite.isfinite()].sort().values
    numbers = torch.cat((finite, (finite[1:] + finite[:-1]) / 2, torch.tensor([449.0, -1e30, 1e30])))
    numbers = torch.nn.functional.pad(numbers, (0, -len(numbers) % 16)).view(-1, 1, 16)
    qkv = numbers.repeat(1, 3, 1).to(DEVICE)[:SLOTS]
    own = Projected(qkv, rotation(torch.zeros(len(qkv), 8, device=DEVICE), torch.float32), None)
    _, _, found, wanted = both(own, torch.arange(len(qkv), device=DEVICE), 1, torch.float8_e4m3fn)
    assert torch.equal(found.values.view(torch.uint8), wanted.values.view(torch.uint8))


def test_other_caches_are_left_to_torch():
    layer = poisoned(1, 16, torch.float16).layers[0]
    assert not positions.can_store(torch.zeros(1, 3, 16, dtype=torch.bfloat16), layer)
