"""Steps for attention backends: requests whose KV lies anywhere in a cache, and what attention over it comes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vlmserve.memory.kv_cache import KVCache
from vlmserve.memory.req_to_token import ReqToTokenPool
from vlmserve.models.attention.base import AttentionBackend, ForwardBatch, ForwardMode, RadixAttention
from vlmserve_common.compute.rotary import rotate, rotation
from vlmserve_common.kernels.attention import HeadNorms

PAGE = 16


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Of a decoder."""

    heads: int
    kv_heads: int
    dim: int

    def __str__(self) -> str:
        return f"{self.heads}x{self.dim}-over-{self.kv_heads}"


class Step:
    """requests: (tokens before the step, tokens in it) of each. What lies in the cache outside of them is not a number
    where its dtype has that, and large where it does not."""

    def __init__(
        self,
        requests: Sequence[tuple[int, int]],
        heads: Heads,
        *,
        dtype: torch.dtype,
        cache_dtype: torch.dtype | None,
        device: torch.device,
        seed: int = 0,
    ) -> None:
        self._random = torch.Generator(device).manual_seed(seed)
        self.heads, self.dtype, self.device, self.requests = heads, dtype, device, list(requests)
        self.totals = [before + new for before, new in requests]
        self.lengths = [new for _, new in requests]
        rows = torch.randperm(len(requests) + 3, generator=torch.Generator().manual_seed(seed))[: len(requests)]
        self.rows = rows.to(device)
        self.pool = ReqToTokenPool(len(requests) + 3, max(self.totals) + PAGE, device)
        self.pool.req_to_token.fill_(1 << 20)  # stale entries may be anything
        pages = [-(-total // PAGE) for total in self.totals]
        order = torch.randperm(sum(pages) + 4, generator=torch.Generator().manual_seed(seed + 1))[: sum(pages)] + 1
        self.slots = []
        for row, total, mine in zip(rows.tolist(), self.totals, order.split(pages), strict=True):
            slots = (mine[:, None] * PAGE + torch.arange(PAGE)).flatten()[:total].to(device)
            self.pool.write(row, 0, slots)
            self.slots.append(slots)
        self.cache = KVCache(
            num_slots=(sum(pages) + 5) * PAGE,
            num_layers=1,
            num_kv_heads=heads.kv_heads,
            head_dim=heads.dim,
            dtype=cache_dtype or dtype,
            device=device,
        )
        _poison(self.cache)
        self.qkv = self.normal(sum(self.lengths), heads.heads + 2 * heads.kv_heads, heads.dim)
        angles = torch.randn((sum(self.lengths), heads.dim // 2), generator=self._random, device=device)
        self.rotary = rotation(angles, dtype)
        for slots, (before, _) in zip(self.slots, requests, strict=True):
            self.cache.write(0, slots[:before], *(self.normal(before, heads.kv_heads, heads.dim) for _ in range(2)))

    def normal(self, *shape: int) -> torch.Tensor:
        """Of the step's dtype, on its device."""
        return torch.randn(shape, generator=self._random, device=self.device).to(self.dtype)

    def batch(self, backend: AttentionBackend) -> ForwardBatch:
        """For a backend."""
        tokens = sum(self.lengths)
        alone = max(self.lengths) == 1
        written = [slots[before:] for slots, (before, _) in zip(self.slots, self.requests, strict=True)]
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE if alone else ForwardMode.MIXED,
            input_ids=torch.zeros(tokens, dtype=torch.int64, device=self.device),
            positions=torch.zeros((3, tokens), dtype=torch.int64, device=self.device),
            req_pool_indices=self.rows,
            seq_lens=torch.tensor(self.totals, dtype=torch.int32, device=self.device),
            extend_start_loc=torch.tensor([0, *self.lengths]).cumsum(0).to(self.device, torch.int32),
            prefix_lens=[before for before, _ in self.requests],
            extend_lens=self.lengths,
            out_cache_loc=torch.cat(written),
            req_to_token_pool=self.pool,
            kv_cache=self.cache,
            attn_backend=backend,
        )

    @torch.inference_mode()
    def run(self, backend: AttentionBackend, norms: HeadNorms | None = None) -> torch.Tensor:
        """float32 [N, heads * dim]. This step's keys and values are in the cache then."""
        heads = self.heads
        layer = RadixAttention(heads.heads, heads.dim, heads.dim**-0.5, heads.kv_heads, layer_id=0)
        batch = self.batch(backend)
        backend.init_forward_metadata(batch)
        return layer(self.qkv.clone(), self.rotary, norms, batch).float()

    @torch.inference_mode()
    def expected(self) -> torch.Tensor:
        """The same in float32, over the keys and values that lie in the cache when `run` is done."""
        heads = self.heads
        cos, sin = (part.float() for part in self.rotary)
        queries = rotate(self.qkv[:, : heads.heads].float(), cos, sin).split(self.lengths)
        groups = heads.heads // heads.kv_heads
        parts = []
        for q, slots, (before, new) in zip(queries, self.slots, self.requests, strict=True):
            keys, values = (part.repeat_interleave(groups, 1) for part in self.cache.read(0, slots, torch.float32))
            scores = torch.einsum("qhd,khd->hqk", q, keys) * heads.dim**-0.5
            hidden = torch.arange(before + new, device=self.device) > before + torch.arange(
                new, device=self.device
            ).unsqueeze(1)
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            parts.append(torch.einsum("hqk,khd->qhd", weights, values).flatten(1))
        return torch.cat(parts)

    def stored(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """This step's keys and values, float32 [N, kv_heads, dim]: in the cache, and as they should be."""
        heads = self.heads
        cos, sin = (part.float() for part in self.rotary)
        slots = torch.cat([own[before:] for own, (before, _) in zip(self.slots, self.requests, strict=True)])
        keys, values = self.cache.read(0, slots, torch.float32)
        wanted = rotate(self.qkv[:, heads.heads : -heads.kv_heads].float(), cos, sin)
        return keys, values, wanted, self.qkv[:, -heads.kv_heads :].float()


def off(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """How far apart, as a part of the length; not a number where there is one that is none."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def _poison(cache: KVCache) -> None:
    for layer in cache.layers:
        for part in (layer.keys, layer.values):
            if part.dtype == torch.int8:
                part.fill_(127)
            elif part.dtype == torch.float8_e4m3fn:
                part.view(torch.uint8).fill_(0x7F)
            else:
                part.fill_(torch.nan)
        for scales in (layer.key_scales, layer.value_scales):
            if scales is not None:
                scales.fill_(torch.nan)
