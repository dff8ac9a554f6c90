"""Causal attention of several tokens a request over their paged history, which they are part of (FlashAttention-2; Dao
2023).

Query heads of one KV head are rows of one product beside tokens, so that keys and values are read once for all of them
and a short extend fills a product. A query's keys come in the same blocks whatever its tile, chunk and batch mates are:
its answer does not depend on these.
"""

from __future__ import annotations

import math

import numpy as np
import torch
import triton
import triton.language as tl

from vlmserve_common.kernels.attention import CacheLayer
from vlmserve_common.kernels.gpu.common import INTERPRETED, Shape, weigh
from vlmserve_common.kernels.gpu.decode import padded, paged


def tile_shape(dtype: torch.dtype, dim: int) -> Shape:
    """Five stages: slots are loaded two blocks ahead, keys and values by them one block later."""
    if dtype == torch.float32:
        return Shape(rows=32, keys=16, warps=8, stages=2)  # on no tensor core: operands are in registers
    return Shape(rows=128, keys=64 if dim <= 128 else 32, warps=8, stages=5)


def tile_tokens(q_dtype: torch.dtype, cache: CacheLayer, heads: int) -> int:
    """Tokens of a tile, for queries of that dtype and so many heads."""
    _, kv_heads, dim = cache.keys.shape
    rows = tile_shape(q_dtype, dim).rows
    return max(1, rows // (heads // kv_heads))


def extend_tiles(prefix_lens: np.ndarray, extend_lens: np.ndarray, tokens: int, requests: np.ndarray) -> np.ndarray:
    """What programs do: int32 [tiles, 2], a request and the number of the tile's first token among its new ones.

    Those with most keys come first: a GPU that ends with short ones ends evenly. prefix_lens, extend_lens: int [B], of
    a step's requests; requests: int [n], those to attend to.
    """
    lengths, prefixes = extend_lens[requests], prefix_lens[requests]
    counts = -(-lengths // tokens)
    first = (np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)) * tokens
    keys = np.repeat(prefixes, counts) + np.minimum(first + tokens, np.repeat(lengths, counts))
    tiles = np.stack((np.repeat(requests, counts), first), axis=1).astype(np.int32)
    return tiles[np.argsort(-keys, kind="stable")]


def extend_attention(
    q: torch.Tensor,
    cache: CacheLayer,
    table: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    starts: torch.Tensor,
    tiles: torch.Tensor,
    *,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Attend from q [N, heads, dim] for requests that have tiles, and write out [N, heads, dim], which is contiguous.

    table: int32 [rows, context], the slots of a request's tokens at its row. req_pool_indices [B]: that row. seq_lens
    int32 [B]: tokens, with those of q. starts int32 [B + 1]: where a request's rows of q begin. tiles: of
    `extend_tiles`, on the device, for `tile_tokens`. scale > 0. Other requests' slots are not read.
    """
    assert scale > 0
    _, heads, dim = q.shape
    kv_heads = cache.keys.shape[1]
    shape = tile_shape(q.dtype, dim)
    # in one dimension, since a grid's second and third ones end at 65535
    extend_kernel[(kv_heads * len(tiles),)](
        *paged(q, cache, table, req_pool_indices, seq_lens),
        starts,
        tiles,
        out,
        scale * math.log2(math.e),
        q.stride(0),
        q.stride(1),
        table.stride(0),
        HEADS=heads,
        GROUP=heads // kv_heads,
        DIM=dim,
        SCALED=cache.key_scales is not None,
        BLOCK_M=max(shape.rows, int(triton.next_power_of_2(heads // kv_heads))),
        BLOCK_N=shape.keys,
        BLOCK_D=padded(dim),
        WIDEN=INTERPRETED and q.dtype == torch.bfloat16,
        num_warps=shape.warps,
        num_stages=shape.stages,
        enable_fp_fusion=True,
    )


@triton.jit
def extend_kernel(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    table: tl.tensor,
    req_pool_indices: tl.tensor,
    seq_lens: tl.tensor,
    starts: tl.tensor,
    tiles: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    q_stride: tl.tensor,
    q_head_stride: tl.tensor,
    table_stride: tl.tensor,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """A tile of tokens, with all query heads of a KV head."""
    KV_HEADS: tl.constexpr = HEADS // GROUP
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0) % KV_HEADS
    tile = tiles + 2 * (tl.program_id(0) // KV_HEADS)
    request = tl.load(tile)
    first_token = tl.load(tile + 1)
    start = tl.load(starts + request)
    count = tl.load(starts + request + 1) - start
    length = tl.load(seq_lens + request)
    slots = table + tl.load(req_pool_indices + request).to(tl.int64) * table_stride

    rows = tl.arange(0, BLOCK_M)
    token = first_token + rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    live = (token < count) & (rows < TOKENS * GROUP)
    place = length - count + token  # in the whole request
    d = tl.arange(0, BLOCK_D)
    mine = live[:, None] & (d < DIM)[None, :]
    at = (start + token).to(tl.int64)
    queries = tl.load(q + (at * q_stride + head * q_head_stride)[:, None] + d[None, :], mask=mine, other=0.0)
    if WIDEN:
        queries = queries.to(tl.float32)

    most = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # every row sees the blocks before `seen`; some see some of the keys from there to `end`
    seen = (length - count + first_token + 1) // BLOCK_N * BLOCK_N
    end = tl.minimum(length, length - count + first_token + TOKENS)
    acc, most, total = _over_keys(
        queries, keys, values, key_scales, value_scales, slots, kv_head, scale, 0, seen, end, place, acc, most, total,
        KV_HEADS, DIM, SCALED, BLOCK_N, BLOCK_D, MASKED=False,
    )  # fmt: skip
    acc, most, total = _over_keys(
        queries, keys, values, key_scales, value_scales, slots, kv_head, scale, seen, end, end, place, acc, most, total,
        KV_HEADS, DIM, SCALED, BLOCK_N, BLOCK_D, MASKED=True,
    )  # fmt: skip
    result = acc / total[:, None]
    tl.store(out + ((at * HEADS + head) * DIM)[:, None] + d[None, :], result.to(out.dtype.element_ty), mask=mine)


@triton.jit
def _over_keys(
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    slots: tl.tensor,
    kv_head: tl.tensor,
    scale: tl.tensor,
    begin: tl.tensor,
    stop: tl.tensor,
    end: tl.tensor,
    place: tl.tensor,
    acc: tl.tensor,
    most: tl.tensor,
    total: tl.tensor,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Attention over keys from `begin` to `stop`; MASKED: those after a query, or from `end` on, are not seen."""
    d = tl.arange(0, BLOCK_D)
    for first in range(begin, stop, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        there = key < end
        slot = (tl.load(slots + key, mask=there, other=0) if MASKED else tl.load(slots + key)).to(tl.int64)
        slot = slot * KV_HEADS + kv_head
        at = slot[:, None] * DIM + d[None, :]
        wanted = (there[:, None] if MASKED else tl.full([BLOCK_N, 1], 1, tl.int1)) & (d < DIM)[None, :]
        k = tl.load(keys + at, mask=wanted, other=0.0).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee")
        if SCALED:
            scores *= tl.load(key_scales + slot, mask=there, other=0.0)[None, :]
        if MASKED:
            scores = tl.where(there[None, :] & (key[None, :] <= place[:, None]), scores, -float("inf"))
        weights, factor, most, total = weigh(scores, scale, most, total)
        v = tl.load(values + at, mask=wanted, other=0.0).to(queries.dtype)
        if SCALED:
            weights *= tl.load(value_scales + slot, mask=there, other=0.0)[None, :]
        acc = tl.dot(weights.to(v.dtype), v, acc * factor[:, None], input_precision="ieee")
    return acc, most, total
