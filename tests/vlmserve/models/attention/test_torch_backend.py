"""The torch backend against attention written out, over histories that lie in one run, in several, or scattered."""

import pytest
import torch
from torch.nn import functional as F

from tests.vlmserve.models.steps import forward_batch
from vlmserve.memory.kv_cache import KVCache
from vlmserve.memory.req_to_token import ReqToTokenPool
from vlmserve.models.attention.base import RadixAttention
from vlmserve.models.attention.torch_backend import MAX_RUNS, TorchAttentionBackend
from vlmserve_common.compute.rotary import rotation

HEADS, KV_HEADS, DIM, SLOTS = 6, 2, 16, 400
CPU = torch.device("cpu")


def plain(q, k, v, scale):
    """q [T, H, D] at the end of k, v [S, Hkv, D], in float64."""
    seen = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
    parts = (part.transpose(0, 1)[None].double() for part in (q, k, v))
    return (
        F.scaled_dot_product_attention(*parts, attn_mask=seen, scale=scale, enable_gqa=True)[0]
        .transpose(0, 1)
        .flatten(1)
    )


def layout(kind, start, length, gen):
    if kind == "run":
        return torch.arange(start, start + length)
    if kind == "runs":
        middle = length // 2
        return torch.cat([torch.arange(start + 60, start + 60 + middle), torch.arange(start, start + length - middle)])
    return start + torch.randperm(120, generator=gen)[:length]


@pytest.mark.parametrize("kind", ["run", "runs", "scattered"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[(0, 9), (37, 5)], [(50, 1), (8, 1), (1, 1)], [(20, 1), (0, 12), (33, 30)]])
def test_equals_attention_written_out(kind, dtype, lengths):
    gen = torch.Generator().manual_seed(0)
    cache = KVCache(num_slots=SLOTS, num_layers=2, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=dtype, device=CPU)
    pool = ReqToTokenPool(len(lengths), 128, CPU)
    histories, queries, keys, values = [], [], [], []
    req_pool_indices = list(range(len(lengths)))[::-1]
    for i, (prefix, extend) in enumerate(lengths):
        total = prefix + extend
        where = layout(kind, 1 + 130 * i, total, gen)
        pool.write(req_pool_indices[i], 0, where)
        k, v = (torch.randn(total, KV_HEADS, DIM, generator=gen).to(dtype) for _ in range(2))
        cache.write(1, where[:prefix], k[:prefix], v[:prefix])
        q = torch.randn(extend, HEADS, DIM, generator=gen).to(dtype)
        histories.append((q, k, v))
        queries.append(q)
        keys.append(k[prefix:])
        values.append(v[prefix:])
    backend = TorchAttentionBackend()
    prefixes, new = (list(part) for part in zip(*lengths, strict=True))
    batch = forward_batch(backend, prefixes, new, rows=req_pool_indices, pool=pool, kv_cache=cache)
    layer = RadixAttention(HEADS, DIM, 0.3, KV_HEADS, layer_id=1)
    backend.init_forward_metadata(batch)
    qkv = torch.cat([torch.cat(part) for part in (queries, keys, values)], dim=1)
    unturned = rotation(torch.zeros(len(qkv), DIM // 2), dtype)
    out = layer(qkv, unturned, None, batch)
    want = torch.cat([plain(q, k, v, 0.3) for q, k, v in histories])
    assert torch.allclose(out.double(), want, atol=1e-5 if dtype == torch.float32 else 3e-2)


def test_a_history_in_few_runs_is_read_where_it_lies():
    """No gather: the attended keys share the cache's memory."""
    from vlmserve.models.attention import torch_backend

    cache = KVCache(num_slots=100, num_layers=1, num_kv_heads=KV_HEADS, head_dim=DIM, dtype=torch.float32, device=CPU)
    for slots, copies in (
        (torch.arange(5, 60), False),
        (torch.cat([torch.arange(50, 60), torch.arange(5, 20)]), False),
        (torch.arange(0, 4 * MAX_RUNS, 2), True),
    ):
        history = torch_backend._history(slots.numpy(), slots)
        past = torch_backend._past(history, cache, 0, torch.float32)
        assert sum(len(k) for k, _ in past) == len(slots)
        shared = all(
            k.untyped_storage().data_ptr() == cache.layers[0].keys.untyped_storage().data_ptr() for k, _ in past
        )
        assert shared != copies
