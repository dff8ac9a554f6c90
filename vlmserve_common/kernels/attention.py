"""Attention over a paged KV cache, and the rotation and writes before it; see `cpp/attention.cpp`, `cpp/qkv.cpp`,
`cpp/cache.h`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from vlmserve_common.kernels.library import active, operators, pointer

# The library's names for what a cache holds.
CACHE_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float8_e4m3fn: 2, torch.int8: 3}
_MOST_DIM = 256


@dataclass(frozen=True, kw_only=True)
class CacheLayer:
    """A layer's keys and values [slots, kv_heads, dim]; float32 scales [slots, kv_heads] go with int8."""

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None

    @property
    def pointers(self) -> tuple[int | None, ...]:
        """The addresses of keys, values and their scales, for the library."""
        return tuple(map(pointer, (self.keys, self.values, self.key_scales, self.value_scales)))


@dataclass(frozen=True, kw_only=True)
class HeadNorms:
    """The weights [dim] of the RMS norms of queries' and keys' heads."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float


def can_attend(dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the library can attend with queries of a dtype, a cache of a dtype, and heads of this size."""
    fits = head_dim % 16 == 0 and head_dim <= _MOST_DIM
    known = dtype in (torch.float32, torch.bfloat16) and cache_dtype in (dtype, torch.float8_e4m3fn, torch.int8)
    return active() is not None and fits and known


def write_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    norms: HeadNorms | None,
    slots: torch.Tensor,
    cache: CacheLayer,
) -> None:
    """Normalise and turn queries and keys of qkv [N, heads + 2 * kv_heads, dim]; put keys and values into the cache.

    Queries are replaced in qkv, which is contiguous. cos and signed sin, float32 or of qkv's dtype: [N, 1, dim], see
    `compute.rotary.rotation`. slots: int64 [N].
    """
    tokens, all_heads, dim = qkv.shape
    kv_heads = cache.keys.shape[1]
    operators().vs_qkv(
        int(qkv.dtype == torch.bfloat16),
        int(cos.dtype == torch.bfloat16),
        CACHE_KINDS[cache.keys.dtype],
        qkv.data_ptr(),
        tokens,
        all_heads - 2 * kv_heads,
        kv_heads,
        dim,
        pointer(norms.q_weight if norms else None),
        pointer(norms.k_weight if norms else None),
        norms.eps if norms else 0.0,
        cos.data_ptr(),
        sin.data_ptr(),
        slots.data_ptr(),
        *cache.pointers,
    )


def attend(
    qkv: torch.Tensor,
    scale: float,
    requests: torch.Tensor,
    table: torch.Tensor,
    cache: CacheLayer,
    window: int = 0,
) -> torch.Tensor:
    """Compute causal attention of a step's queries. Returns [N, heads * dim].

    qkv [N, heads + 2 * kv_heads, dim], after `write_kv`. table int32 [rows, most]: the slots of each request's tokens.
    requests int64 [B, 4]: a request's row in `table`, its tokens before this step, its tokens in this step, and the row
    of the first of them in qkv. window: the tokens that a query sees, its own the last of them; 0: all before it.
    """
    tokens, all_heads, dim = qkv.shape
    kv_heads = cache.keys.shape[1]
    heads = all_heads - 2 * kv_heads
    out = torch.empty((tokens, heads * dim), dtype=qkv.dtype)
    operators().vs_attention(
        int(qkv.dtype == torch.bfloat16),
        CACHE_KINDS[cache.keys.dtype],
        qkv.data_ptr(),
        qkv.stride(0),
        out.data_ptr(),
        *cache.pointers,
        heads,
        kv_heads,
        dim,
        scale,
        table.data_ptr(),
        table.stride(0),
        requests.data_ptr(),
        len(requests),
        window,
    )
    return out
