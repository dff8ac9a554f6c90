"""One launch between the product of queries, keys and values, and attention.

Heads are normalised and turned by their positions. Keys and values go into the KV cache in its own format. The kernel
rounds where `models.attention.base` and `KVCache.write` do: quotient, product with the weight, both products of the
rotation, their sum, and the stored values.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from vlmserve_common.compute.fp8 import FP8_CAPABILITY
from vlmserve_common.compute.rotary import Rotation
from vlmserve_common.kernels.attention import CacheLayer, HeadNorms
from vlmserve_common.kernels.gpu.common import rounded

# Tokens of a program, which has one head of each: 16 bytes a thread of two warps, of 64 16-bit elements each half.
_TOKENS, _WARPS = 8, 2


def can_store(qkv: torch.Tensor, cache: CacheLayer) -> bool:
    """Whether the kernel knows what the cache holds, on qkv's device (8-bit floats need compute capability 8.9)."""
    if cache.keys.dtype == torch.float8_e4m3fn:
        return not qkv.is_cuda or _capability(qkv.device) >= FP8_CAPABILITY
    return cache.keys.dtype in (qkv.dtype, torch.int8)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def position_and_store(
    qkv: torch.Tensor, rotary: Rotation, norms: HeadNorms | None, slots: torch.Tensor, cache: CacheLayer
) -> torch.Tensor:
    """Return the turned queries [N, heads, dim] of qkv [N, heads + 2 * kv_heads, dim], dim even; both are contiguous.
    Keys and values are written to slots int64 [N] of the cache (see `can_store`).

    rotary: of qkv's dtype; see `compute.rotary.rotation`.
    """
    tokens, all_heads, dim = qkv.shape
    kv_heads = cache.keys.shape[1]
    q = qkv.new_empty(tokens, all_heads - 2 * kv_heads, dim)
    if tokens:
        position_and_store_kernel[(triton.cdiv(tokens, _TOKENS), all_heads)](
            qkv,
            q,
            *rotary,
            None if norms is None else norms.q_weight,
            None if norms is None else norms.k_weight,
            0.0 if norms is None else norms.eps,
            slots,
            cache.keys,
            cache.values,
            cache.key_scales,
            cache.value_scales,
            tokens,
            HEADS=all_heads - 2 * kv_heads,
            KV_HEADS=kv_heads,
            HALF=dim // 2,
            BLOCK=triton.next_power_of_2(dim // 2),
            TOKENS=_TOKENS,
            NORM=norms is not None,
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )
    return q


@triton.jit(do_not_specialize=["tokens"])
def position_and_store_kernel(
    qkv: tl.tensor,
    q: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    eps: tl.tensor,
    slots: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    tokens: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    NORM: tl.constexpr,
) -> None:
    """One head of some tokens a program, as its two halves, so that rotation moves nothing between threads."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    there = token < tokens
    inside = there[:, None] & (column < HALF)[None, :]
    source = qkv + ((token * (HEADS + 2 * KV_HEADS) + head) * 2 * HALF)[:, None] + column[None, :]
    first = tl.load(source, mask=inside, other=0.0)
    second = tl.load(source + HALF, mask=inside, other=0.0)
    if head < HEADS:
        first, second = _normalised(first, second, q_weight, eps, column, HALF, NORM)
        first, second = _turned(first, second, cos, sin, token, column, inside, HALF)
        to = q + ((token * HEADS + head) * 2 * HALF)[:, None] + column[None, :]
        tl.store(to, first, mask=inside)
        tl.store(to + HALF, second, mask=inside)
    else:
        slot = tl.load(slots + token, mask=there, other=0)
        if head < HEADS + KV_HEADS:
            first, second = _normalised(first, second, k_weight, eps, column, HALF, NORM)
            first, second = _turned(first, second, cos, sin, token, column, inside, HALF)
            row = slot * KV_HEADS + head - HEADS
            _store(first, second, keys, key_scales, row, column, there, inside, HALF)
        else:
            row = slot * KV_HEADS + head - HEADS - KV_HEADS
            _store(first, second, values, value_scales, row, column, there, inside, HALF)


@triton.jit
def _normalised(
    first: tl.tensor,
    second: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    column: tl.tensor,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    if NORM:
        dtype: tl.constexpr = first.dtype
        a, b = first.to(tl.float32), second.to(tl.float32)
        scale = tl.rsqrt(tl.sum(a * a + b * b, axis=1) / (2 * HALF) + eps)[:, None]
        a, b = rounded(a * scale, dtype).to(tl.float32), rounded(b * scale, dtype).to(tl.float32)
        inside = column < HALF
        a *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        b *= tl.load(weight + HALF + column, mask=inside, other=0.0).to(tl.float32)[None, :]
        first, second = rounded(a, dtype), rounded(b, dtype)
    return first, second


@triton.jit
def _turned(
    first: tl.tensor,
    second: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    token: tl.tensor,
    column: tl.tensor,
    inside: tl.tensor,
    HALF: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    dtype: tl.constexpr = first.dtype
    a, b = first.to(tl.float32), second.to(tl.float32)
    # both halves of the cosine are alike, and the second of the sine is the first with its sign changed
    where = token[:, None] * (2 * HALF) + column[None, :]
    c = tl.load(cos + where, mask=inside, other=0.0).to(tl.float32)
    s = tl.load(sin + where + HALF, mask=inside, other=0.0).to(tl.float32)
    turned_a = rounded(a * c, dtype).to(tl.float32) - rounded(b * s, dtype).to(tl.float32)
    turned_b = rounded(b * c, dtype).to(tl.float32) + rounded(a * s, dtype).to(tl.float32)
    return rounded(turned_a, dtype), rounded(turned_b, dtype)


@triton.jit
def _store(
    first: tl.tensor,
    second: tl.tensor,
    to: tl.tensor,
    scales: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    there: tl.tensor,
    inside: tl.tensor,
    HALF: tl.constexpr,
) -> None:
    """Rows int64 of `to` [rows, 2 * HALF] and of its scales [rows], where it has some."""
    stored: tl.constexpr = to.dtype.element_ty
    where = to + (row * 2 * HALF)[:, None] + column[None, :]
    if stored == tl.int8:
        a, b = first.to(tl.float32), second.to(tl.float32)
        scale = tl.div_rn(tl.max(tl.maximum(tl.abs(a), tl.abs(b)), axis=1), 127.0)
        scale = tl.where(scale > 0, scale, 1.0)
        tl.store(scales + row, scale, mask=there)
        # adding 1.5 * 2^23 leaves no bits for a fraction, and rounds it to the nearest, to even of two
        first = (tl.div_rn(a, scale[:, None]) + 12582912.0) - 12582912.0
        second = (tl.div_rn(b, scale[:, None]) + 12582912.0) - 12582912.0
    elif stored == tl.float8e4nv:
        # a NaN stays one
        first = tl.clamp(first.to(tl.float32), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        second = tl.clamp(second.to(tl.float32), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
        first, second = rounded(first, stored), rounded(second, stored)
    tl.store(where, first.to(stored), mask=inside)
    tl.store(where + HALF, second.to(stored), mask=inside)
