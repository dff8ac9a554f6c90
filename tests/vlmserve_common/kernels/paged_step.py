"""A step over a paged KV cache, for tests of attention kernels: scattered slots, and NaN in all that are not its."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from tests.vlmserve.models.batches import forward_batch
from tests.vlmserve_common.kernels.triton_device import DEVICE
from vlmserve.memory.kv_cache import KVCache
from vlmserve.memory.req_to_token import ReqToTokenPool
from vlmserve.models.attention.base import AttentionBackend, ForwardBatch
from vlmserve_common.kernels.attention import CacheLayer

QUICK_AND_SLOW_DTYPES = [
    pytest.param(dtype, stored, marks=[] if dtype == torch.bfloat16 else pytest.mark.slow, id=f"{dtype}-{stored}")
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
    for stored in (None, torch.float8_e4m3fn, torch.int8)
]
"""Dtypes of queries and of a cache (None: the same). Triton's interpreter runs only one of the first in quick tests."""


@dataclass(frozen=True, kw_only=True)
class PagedStep:
    """A step: queries, keys and values `qkv` of its tokens, and a cache that has all keys and values already.

    lengths: of each request, tokens before the step and in it. table: has an unused slot behind a request's end.
    """

    lengths: list[tuple[int, int]]
    qkv: torch.Tensor
    cache: KVCache
    table: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    starts: torch.Tensor

    @property
    def q(self) -> torch.Tensor:
        """Queries [N, heads, dim], with a stride as they come out of a product with keys and values."""
        return self.qkv[:, : self.qkv.shape[1] - 2 * self.layer.keys.shape[1]]

    @property
    def layer(self) -> CacheLayer:
        return self.cache.layers[0]

    def truth(self, scale: float, queries: torch.Tensor | None = None, window: int = 0) -> torch.Tensor:
        """float64 [N, heads, dim], written out, over what is in the cache. queries: in place of the step's own. window:
        the keys that each sees; 0: all before it."""
        outs = []
        queries = (self.q if queries is None else queries).double().split([new for _, new in self.lengths])
        for (past, new), row, q in zip(self.lengths, self.req_pool_indices.tolist(), queries, strict=True):
            keys, values = self.cache.read(0, self.table[row, : past + new].long(), torch.float64)
            keys, values = (x.repeat_interleave(q.shape[1] // keys.shape[1], 1) for x in (keys, values))
            seen = torch.ones(new, past + new, dtype=torch.bool, device=q.device).tril(past)
            seen = seen.triu(past + 1 - window) if window else seen
            scores = torch.einsum("thd,shd->hts", q, keys) * scale
            outs.append(torch.einsum("hts,shd->thd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values))
        return torch.cat(outs)

    def batch(self, backend: AttentionBackend) -> ForwardBatch:
        """Make the step's batch. It writes keys and values where the cache has some."""
        pool = ReqToTokenPool(*self.table.shape, self.table.device)
        pool.req_to_token = self.table
        return forward_batch(backend, pool, self.cache, self.req_pool_indices.tolist(), self.lengths)

    def alone(self, request: int) -> PagedStep:
        """One of its requests, in the same cache."""
        first, last = self.starts[request : request + 2].tolist()
        return PagedStep(
            lengths=[self.lengths[request]],
            qkv=self.qkv[first:last],
            cache=self.cache,
            table=self.table,
            req_pool_indices=self.req_pool_indices[request : request + 1],
            seq_lens=self.seq_lens[request : request + 1],
            starts=torch.tensor([0, last - first], dtype=torch.int32, device=self.qkv.device),
        )


def make_step(
    lengths: list[tuple[int, int]],
    *,
    heads: tuple[int, int] = (4, 2),
    dim: int = 16,
    dtype: torch.dtype = torch.float32,
    stored: torch.dtype | None = None,
    page: int = 1,
    context: int | None = None,
    seed: int = 0,
    device: torch.device = DEVICE,
) -> PagedStep:
    """Make a step. heads: of queries, of keys. stored: dtype of the cache; None: dtype. page: slots side by side."""
    generator = torch.Generator().manual_seed(seed)
    totals = [past + new for past, new in lengths]
    pages = [-(-total // page) for total in totals]
    places = torch.randperm(sum(pages) + 3, generator=generator)
    slots = (places[:, None] * page + torch.arange(page)).view(-1)
    cache = KVCache(
        num_slots=len(slots), num_layers=1, num_kv_heads=heads[1], head_dim=dim, dtype=stored or dtype, device=device
    )
    rows = torch.randperm(len(lengths) + 2, generator=generator)[: len(lengths)]
    nobodys = int(slots[-1])
    table = torch.full((len(lengths) + 2, context or max(totals) + 3), nobodys, dtype=torch.int32)
    first = 0
    for row, total, count in zip(rows.tolist(), totals, pages, strict=True):
        table[row, :total] = slots[first : first + total]
        first += count * page
    _poison(cache.layers[0])
    own = torch.cat([table[row, :total] for row, total in zip(rows.tolist(), totals, strict=True)]).long().to(device)
    keys, values = (torch.randn(len(own), heads[1], dim, generator=generator).to(device, dtype) for _ in range(2))
    cache.write(0, own, keys, values)
    new = [new for _, new in lengths]
    qkv = torch.randn(sum(new), heads[0] + 2 * heads[1], dim, generator=generator).to(device, dtype)
    return PagedStep(
        lengths=lengths,
        qkv=qkv,
        cache=cache,
        table=table.to(device),
        req_pool_indices=rows.to(device),
        seq_lens=torch.tensor(totals, dtype=torch.int32, device=device),
        starts=torch.tensor([0, *new], device=device).cumsum(0, dtype=torch.int32),
    )


def _poison(layer: CacheLayer) -> None:
    nan = float("nan")
    for stored, scales in ((layer.keys, layer.key_scales), (layer.values, layer.value_scales)):
        if scales is not None:
            scales.fill_(nan)
            stored.fill_(77)
        elif stored.dtype == torch.float8_e4m3fn:
            stored.view(torch.uint8).fill_(0x7F)
        else:
            stored.fill_(nan)


def tolerance(dtype: torch.dtype) -> float:
    """Of a kernel in that dtype, against float64 over the cache as it is read."""
    return {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """How far apart, as a part of the length; not a number where there is one that is none."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())
