"""Attention with plain torch: the reference, and the fallback where no other backend works.

A request's history is read in place. The allocator keeps a request's slots in few contiguous runs. Each run is a slice
of the KV cache and attended on its own, and the partial results are merged by their log-sum-exp (as in Flash decoding;
Dao et al. 2023). Grouped heads need no copy either: query heads of one KV head become query rows (decode) or a stride-0
head dimension (extend). A history in many short runs is gathered, and so is any history on another device than the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from vlmserve.memory.kv_cache import KVCache
from vlmserve.models.attention.base import AttentionBackend, ForwardBatch, Projected, RadixAttention, positioned

MAX_RUNS = 8


@dataclass(frozen=True)
class _History:
    """The place of a request's cached tokens: contiguous runs (start, end), or slots to gather."""

    runs: tuple[tuple[int, int], ...]
    slots: torch.Tensor | None = None


@dataclass(frozen=True)
class _Extend:
    """One request of the step; its tokens are start..start+length of the batch."""

    start: int
    length: int
    history: _History


class TorchAttentionBackend(AttentionBackend):
    """Attends request by request. Holds the plans of the current step only, by the windows of layers."""

    def __init__(self) -> None:
        self._plans: dict[int, list[_Extend]] = {}

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan for layers without windows. Others are planned for when the first of them attends."""
        self._plans = {}
        self._plan(forward_batch, 0)

    def _plan(self, forward_batch: ForwardBatch, window: int) -> list[_Extend]:
        """Find every request's runs, as far as a layer's window goes (0: all); those of a single token include its own
        slot, written before it is read. The table is read once for all such layers: on a GPU each reading waits for all
        earlier work."""
        if window in self._plans:
            return self._plans[window]
        before, lengths = forward_batch.prefix_lens, forward_batch.extend_lens
        ends = [prefix + (length == 1) for prefix, length in zip(before, lengths, strict=True)]
        starts = [max(0, prefix + 1 - window) if window else 0 for prefix in before]
        _, table = forward_batch.slots_of(windowed=window > 0)
        slots = table[forward_batch.req_pool_indices, : max(ends, default=0)]
        plan, start = list[_Extend](), 0
        for host, device, length, first, end in zip(slots.cpu().numpy(), slots, lengths, starts, ends, strict=True):
            plan.append(_Extend(start, length, _history(host[first:end], device[first:end])))
            start += length
        self._plans[window] = plan
        return plan

    def forward(self, own: Projected, layer: RadixAttention, forward_batch: ForwardBatch) -> torch.Tensor:
        """Attend, one request after the other."""
        cache = forward_batch.kv_cache
        q, k, v = positioned(own, layer.num_kv_heads)
        k, v = cache.write(layer.layer_id, forward_batch.slots_of(windowed=layer.window > 0)[0], k, v)
        out = torch.empty_like(q)
        for extend in self._plan(forward_batch, layer.window):
            tokens = slice(extend.start, extend.start + extend.length)
            past = _past(extend.history, cache, layer.layer_id, q.dtype)
            if q.is_cpu and not layer.window:
                parts = [_attend(q[tokens], keys, values, layer, causal=False) for keys, values in past]
                if extend.length > 1:
                    parts.append(_attend(q[tokens], k[tokens], v[tokens], layer, causal=True))
                out[tokens] = _merge(parts)
            else:
                new = [(k[tokens], v[tokens])] if extend.length > 1 else []
                keys, values = (torch.cat(part) for part in zip(*past, *new, strict=True))
                out[tokens] = _attend_masked(q[tokens], keys, values, layer)
        return out.flatten(1)


def _history(host: np.ndarray, slots: torch.Tensor) -> _History:
    """Return the contiguous runs of slots int [n], given the same on the host, too; or the slots if the runs are many
    and short."""
    if not len(host):
        return _History(())
    breaks = np.flatnonzero(np.diff(host) != 1) + 1
    starts = np.concatenate(([0], breaks))
    ends = np.concatenate((breaks, [len(host)]))
    if len(starts) > MAX_RUNS:
        return _History((), slots.long())
    return _History(tuple((int(host[a]), int(host[b - 1]) + 1) for a, b in zip(starts, ends, strict=True)))


def _past(
    history: _History, cache: KVCache, layer_id: int, dtype: torch.dtype
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    if history.slots is not None:
        return [cache.read(layer_id, history.slots, dtype)]
    return [cache.read(layer_id, slice(*run), dtype) for run in history.runs]


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with q [T, H, D] over k, v [S, Hkv, D] -> (out [T, H, D], log-sum-exp float32 [T, H]); CPU only.

    causal: query i sees keys 0..i (T == S).
    """
    length, heads, dim = q.shape
    groups = heads // layer.num_kv_heads
    grouped = q.view(length, layer.num_kv_heads, groups, dim)
    keys, values = k.transpose(0, 1), v.transpose(0, 1)
    if length == 1:
        # [1, Hkv, G, D]: the heads of a group are query rows over the same keys
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            grouped, keys[None], values[None], 0.0, False, scale=layer.scaling
        )
        return out.reshape(1, heads, dim), lse.reshape(1, heads)
    # [Hkv, G, T, D] with keys that have stride 0 over G
    shape = (layer.num_kv_heads, groups, k.shape[0], dim)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        grouped.permute(1, 2, 0, 3),
        keys[:, None].expand(shape),
        values[:, None].expand(shape),
        0.0,
        causal,
        scale=layer.scaling,
    )
    return out.permute(2, 0, 1, 3).reshape(length, heads, dim), lse.permute(2, 0, 1).reshape(length, heads)


def _merge(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Merge attention over disjoint key sets into attention over their union: weights softmax(lse)."""
    if len(parts) == 1:
        return parts[0][0]
    weights = torch.softmax(torch.stack([lse for _, lse in parts]), dim=0)
    merged = sum(out.float() * weight[..., None] for (out, _), weight in zip(parts, weights, strict=True))
    return merged.to(parts[0][0].dtype)


def _attend_masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: RadixAttention) -> torch.Tensor:
    """Attend with q [T, H, D], the last T of the S tokens of k, v [S, Hkv, D] -> [T, H, D]; any device."""
    length, total = q.shape[0], k.shape[0]
    # no mask where none is needed: fused kernels take none
    mask = None
    if 1 < length < total or (length > 1 and 0 < layer.window < total):
        mask = torch.ones(length, total, dtype=torch.bool, device=q.device).tril(total - length)
        if layer.window:
            mask = mask.triu(total - length + 1 - layer.window)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None and 1 < length == total,
        scale=layer.scaling,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)
