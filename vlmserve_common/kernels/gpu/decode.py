"""Attention of one token a request over its paged history, split among programs (Flash decoding; Dao et al. 2023).

How a history is split depends on its length alone, so that an answer does not depend on batch mates. Programs are as
many as the batch needs to fill a GPU: each takes some of the splits. Nothing here depends on values on the device: a
launch can be captured in a CUDA graph and replayed for other lengths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vlmserve_common.kernels.attention import CacheLayer
from vlmserve_common.kernels.gpu.common import INTERPRETED, weigh

# Tokens of a split of a short history. Fewer: more partial results to write (3% of the bytes of keys and values, with 4
# query heads of 128 bfloat16 to a KV head); more: too few programs for a short history alone.
SHORTEST_SPLIT = 256
# Programs that one request of a long history is to get: two for each of a large GPU's multiprocessors.
_PROGRAMS_ALONE = 256
# Programs of a batch. Beyond these, splits share programs: where most of them are empty, starting them takes longer
# than attending.
_PROGRAMS = 8192
_LEAST_ROWS = 16  # of a tensor core's product


@dataclass(frozen=True, kw_only=True)
class SplitWorkspace:
    """Partial results for the merge. partial: float32 [batch * splits * heads * dim], attention over each split;
    logs: float32 [batch * splits * heads], logarithms to 2 of its sums of weights."""

    partial: torch.Tensor
    logs: torch.Tensor

    @staticmethod
    def make(*, batch: int, heads: int, kv_heads: int, dim: int, context: int, device: torch.device) -> SplitWorkspace:
        """For `batch` requests of up to `context` tokens."""
        rows = batch * most_splits(context, kv_heads) * heads
        partial, logs = (torch.empty(size, dtype=torch.float32, device=device) for size in (rows * dim, rows))
        return SplitWorkspace(partial=partial, logs=logs)

    def holds(self, *, batch: int, heads: int, kv_heads: int, dim: int, context: int) -> bool:
        """Whether it is large enough."""
        rows = batch * most_splits(context, kv_heads) * heads
        return rows * dim <= len(self.partial) and rows <= len(self.logs)


def most_splits(context: int, kv_heads: int) -> int:
    """Splits of a history of `context` tokens, the longest one: a power of two."""
    wanted = max(1, _PROGRAMS_ALONE // kv_heads)
    return int(triton.next_power_of_2(min(triton.cdiv(context, SHORTEST_SPLIT), wanted)))


def decode_attention(
    q: torch.Tensor,
    cache: CacheLayer,
    table: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float,
    out: torch.Tensor,
    workspace: SplitWorkspace,
    requests: torch.Tensor | None = None,
    starts: torch.Tensor | None = None,
) -> None:
    """Attend from q [N, heads, dim] to whole histories, and write out [N, heads, dim], which is contiguous.

    table: int32 [rows, context], the slots of a request's tokens at its row. req_pool_indices [B]: that row. seq_lens
    int32 [B]: tokens, with those of q, and 0 for rows that are not in use, which get zeros. Without `requests`, request
    i has row i of q. If they are given, int32 [n], only these requests are attended to, at row starts[request] of q.
    Other rows of `out` are left alone. scale > 0. Other requests' slots are not read.
    """
    assert scale > 0
    _, heads, dim = q.shape
    kv_heads = cache.keys.shape[1]
    group = heads // kv_heads
    batch = len(seq_lens) if requests is None else len(requests)
    assert workspace.holds(batch=batch, heads=heads, kv_heads=kv_heads, dim=dim, context=table.shape[1])
    splits = most_splits(table.shape[1], kv_heads)
    head_blocks = triton.cdiv(group, _LEAST_ROWS)
    workers = max(1, min(splits, _PROGRAMS // (batch * kv_heads * head_blocks)))
    chosen = (seq_lens, seq_lens) if requests is None else (requests, starts)
    shared = {"SPLITS": splits, "SHORTEST": SHORTEST_SPLIT, "HEADS": heads, "DIM": dim, "CHOSEN": requests is not None}
    block_n, warps, stages = block_shape(q.dtype, dim)
    split_kernel[kv_heads * head_blocks, workers, batch](
        *paged(q, cache, table, req_pool_indices, seq_lens),
        *chosen,
        workspace.partial,
        workspace.logs,
        scale * math.log2(math.e),
        q.stride(0),
        q.stride(1),
        table.stride(0),
        **shared,
        GROUP=group,
        SCALED=cache.key_scales is not None,
        BLOCK_N=block_n,
        BLOCK_D=padded(dim),
        WIDEN=INTERPRETED and q.dtype == torch.bfloat16,
        num_warps=warps,
        num_stages=stages,
        enable_fp_fusion=True,
    )
    merge_kernel[heads, batch](
        workspace.partial,
        workspace.logs,
        out,
        seq_lens,
        *chosen,
        **shared,
        BLOCK_D=padded(dim),
        BLOCK_N=block_n,
        num_warps=merge_warps(splits, dim),
        enable_fp_fusion=True,
    )


def paged(
    q: torch.Tensor, cache: CacheLayer, table: torch.Tensor, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The first arguments of kernels that attend; other tensors stand for scales that are not there."""
    scales = (seq_lens if scales is None else scales for scales in (cache.key_scales, cache.value_scales))
    return q, cache.keys, cache.values, *scales, table, req_pool_indices, seq_lens


def padded(dim: int) -> int:
    """Elements of a head in registers."""
    return max(16, int(triton.next_power_of_2(dim)))


def block_shape(dtype: torch.dtype, dim: int) -> tuple[int, int, int]:
    """Keys of a block, warps, stages of its pipeline."""
    # five stages: slots are loaded two blocks ahead, keys and values by them one block later
    if dtype == torch.float32:
        return (32 if dim <= 128 else 16), 4, 5
    return (64 if dim <= 128 else 32), 4, 5


def merge_warps(splits: int, dim: int) -> int:
    """Of the merge."""
    return 8 if splits * padded(dim) > 4096 else 4


@triton.jit
def _ranges(
    length: tl.tensor, SPLITS: tl.constexpr, SHORTEST: tl.constexpr, BLOCK_N: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """How many splits a history has, and tokens of each but the last: whole blocks."""
    wanted = tl.minimum(tl.cdiv(length, SHORTEST), SPLITS)
    size = tl.cdiv(tl.cdiv(length, tl.maximum(wanted, 1)), BLOCK_N) * BLOCK_N
    return tl.cdiv(length, tl.maximum(size, 1)), size


@triton.jit
def split_kernel(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    table: tl.tensor,
    req_pool_indices: tl.tensor,
    seq_lens: tl.tensor,
    requests: tl.tensor,
    starts: tl.tensor,
    partial: tl.tensor,
    logs: tl.tensor,
    scale: tl.tensor,
    q_stride: tl.tensor,
    q_head_stride: tl.tensor,
    table_stride: tl.tensor,
    SPLITS: tl.constexpr,
    SHORTEST: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    CHOSEN: tl.constexpr,
    GROUP: tl.constexpr,
    SCALED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """Up to 16 query heads of a KV head over every so many-th split of a request."""
    BLOCK_H: tl.constexpr = 16
    KV_HEADS: tl.constexpr = HEADS // GROUP
    HEAD_BLOCKS: tl.constexpr = (GROUP + BLOCK_H - 1) // BLOCK_H
    kv_head = tl.program_id(0) // HEAD_BLOCKS
    in_group = tl.program_id(0) % HEAD_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
    place = tl.program_id(2)
    request = place
    row = place
    if CHOSEN:
        request = tl.load(requests + place)
        row = tl.load(starts + request)
    length = tl.load(seq_lens + request)
    splits, size = _ranges(length, SPLITS, SHORTEST, BLOCK_N)
    if tl.program_id(1) >= splits:
        return
    slots = table + tl.load(req_pool_indices + request).to(tl.int64) * table_stride
    heads = kv_head * GROUP + in_group
    d = tl.arange(0, BLOCK_D)
    in_head = (d < DIM)[None, :]
    mine = (in_group < GROUP)[:, None] & in_head
    queries = tl.load(
        q + row.to(tl.int64) * q_stride + heads[:, None] * q_head_stride + d[None, :], mask=mine, other=0.0
    )
    if WIDEN:
        queries = queries.to(tl.float32)
    for split in range(tl.program_id(1), splits, tl.num_programs(1)):
        end = tl.minimum(length, (split + 1) * size)
        most = tl.full([BLOCK_H], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_H], tl.float32)
        acc = tl.zeros([BLOCK_H, BLOCK_D], tl.float32)
        for first in range(split * size, end, BLOCK_N):
            token = first + tl.arange(0, BLOCK_N)
            there = token < end
            slot = tl.load(slots + token, mask=there, other=0).to(tl.int64) * KV_HEADS + kv_head
            at = slot[:, None] * DIM + d[None, :]
            wanted = there[:, None] & in_head if DIM < BLOCK_D else there[:, None]
            k = tl.load(keys + at, mask=wanted, other=0.0).to(queries.dtype)
            scores = tl.dot(queries, tl.trans(k), input_precision="ieee")
            if SCALED:
                scores *= tl.load(key_scales + slot, mask=there, other=0.0)[None, :]
            scores = tl.where(there[None, :], scores, -float("inf"))
            weights, factor, most, total = weigh(scores, scale, most, total)
            v = tl.load(values + at, mask=wanted, other=0.0).to(queries.dtype)
            if SCALED:
                weights *= tl.load(value_scales + slot, mask=there, other=0.0)[None, :]
            acc = tl.dot(weights.to(v.dtype), v, acc * factor[:, None], input_precision="ieee")
        result = (place * SPLITS + split).to(tl.int64) * HEADS + heads
        tl.store(partial + result[:, None] * DIM + d[None, :], acc / total[:, None], mask=mine)
        tl.store(logs + result, most + tl.log2(total), mask=in_group < GROUP)


@triton.jit
def merge_kernel(
    partial: tl.tensor,
    logs: tl.tensor,
    out: tl.tensor,
    seq_lens: tl.tensor,
    requests: tl.tensor,
    starts: tl.tensor,
    SPLITS: tl.constexpr,
    SHORTEST: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """A head of a request: the mean of its splits, weighted by their sums of weights."""
    head = tl.program_id(0)
    place = tl.program_id(1)
    request = place
    row = place
    if CHOSEN:
        request = tl.load(requests + place)
        row = tl.load(starts + request)
    splits, _ = _ranges(tl.load(seq_lens + request), SPLITS, SHORTEST, BLOCK_N)
    split = tl.arange(0, SPLITS)
    there = split < splits
    d = tl.arange(0, BLOCK_D)
    result = (place * SPLITS + split).to(tl.int64) * HEADS + head
    log = tl.load(logs + result, mask=there, other=-1e30)
    weight = tl.where(there, tl.exp2(log - tl.max(log, 0)), 0.0)
    wanted = there[:, None] & (d < DIM)[None, :]
    parts = tl.load(partial + result[:, None] * DIM + d[None, :], mask=wanted, other=0.0)
    # no splits: no weights, and zeros
    mean = tl.sum(parts * weight[:, None], 0) / tl.maximum(tl.sum(weight, 0), 1e-30)
    at = (row.to(tl.int64) * HEADS + head) * DIM + d
    tl.store(out + at, mean.to(out.dtype.element_ty), mask=d < DIM)
