"""Attention inside segments of a packed batch, each patch to all of its own: what vision towers do.

Heads of 72 and 80 elements are multiplied in two parts, 64 and a rest of 16: padded to 128 they would take nearly twice
the time.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from vlmserve_common.kernels.gpu.common import INTERPRETED, Shape, weigh

TURNED_ROWS = 16


def block_shape(dtype: torch.dtype, dim: int, rows: int) -> Shape:
    """For tiles of so many rows."""
    if dtype == torch.float32:
        return Shape(rows=rows, keys=16, warps=8, stages=2)  # on no tensor core: operands are in registers
    return Shape(rows=rows, keys=64 if dim <= 128 else 32, warps=4 if rows == 64 else 8, stages=3)


def turn(qkv: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> None:
    """Turn queries and keys of qkv [P, 3, heads, dim], in place, as `compute.rotary.rotate` does.

    cos and signed sin (`compute.rotary.rotation`): float32 [P, 1, dim].
    """
    assert qkv.is_contiguous()
    assert cos.is_contiguous()
    assert signed_sin.is_contiguous()
    count, _, heads, dim = qkv.shape
    turn_kernel[(triton.cdiv(count, TURNED_ROWS),)](
        qkv, cos, signed_sin, count, HEADS=heads, HALF=dim // 2, BLOCK=half_block(dim),
        ROWS=TURNED_ROWS, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


def segment_attention(qkv: torch.Tensor, tiles: torch.Tensor, rows: int) -> torch.Tensor:
    """Attend inside segments: qkv [P, 3, heads, dim], turned, contiguous -> [P, heads, dim] in its dtype. Scores are
    divided by sqrt(dim).

    tiles: int32 [tiles, 3] on the device: where a segment begins and ends, and the first of up to `rows`
    queries of it (see `tile_rows`); one with an empty segment does nothing. Rows that no tile has are not written.
    """
    assert qkv.is_contiguous()
    count, _, heads, dim = qkv.shape
    out = qkv.new_empty((count, heads, dim))
    shape = block_shape(qkv.dtype, dim, rows)
    main, rest = head_parts(dim)
    # in one dimension, since a grid's second and third ones end at 65535
    segments_kernel[(heads * len(tiles),)](
        qkv,
        tiles,
        out,
        math.log2(math.e) / math.sqrt(dim),
        HEADS=heads,
        DIM=dim,
        MAIN=main,
        REST=rest,
        BLOCK_M=rows,
        BLOCK_N=shape.keys,
        WIDEN=INTERPRETED and qkv.dtype == torch.bfloat16,
        num_warps=shape.warps,
        num_stages=shape.stages,
        enable_fp_fusion=True,
    )
    return out


def tile_rows(dtype: torch.dtype, longest: int) -> int:
    """Queries of a tile, where the longest segment has that many."""
    if dtype == torch.float32:
        return 32
    return 64 if longest <= 64 else 128


def half_block(dim: int) -> int:
    """Elements of half a head in registers."""
    return int(triton.next_power_of_2(dim // 2))


def head_parts(dim: int) -> tuple[int, int]:
    """A head as a power of two and the rest, which is padded to one; 0: none."""
    main = 1 << (dim.bit_length() - 1)
    if main < 32:
        return max(16, int(triton.next_power_of_2(dim))), 0
    return main, max(16, int(triton.next_power_of_2(dim - main))) if dim > main else 0


@triton.jit(do_not_specialize=["count"])
def turn_kernel(
    qkv: tl.tensor,
    cos: tl.tensor,
    signed_sin: tl.tensor,
    count: tl.tensor,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
) -> None:
    """Turn the heads of ROWS patches, whose angles are read once for all heads."""
    patch = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    d = tl.arange(0, BLOCK)
    there = (patch < count)[:, None] & (d < HALF)[None, :]
    at = (patch.to(tl.int64) * 2 * HALF)[:, None] + d[None, :]
    # both halves have one cosine; the sine of the second half has its own sign
    c = tl.load(cos + at + HALF, mask=there, other=0.0)
    s = tl.load(signed_sin + at + HALF, mask=there, other=0.0)
    for head in range(2 * HEADS):
        first = qkv + ((patch.to(tl.int64) * 3 * HEADS + head) * 2 * HALF)[:, None] + d[None, :]
        a = tl.load(first, mask=there, other=0.0).to(tl.float32)
        b = tl.load(first + HALF, mask=there, other=0.0).to(tl.float32)
        tl.store(first, (a * c - b * s).to(qkv.dtype.element_ty), mask=there)
        tl.store(first + HALF, (b * c + a * s).to(qkv.dtype.element_ty), mask=there)


@triton.jit
def segments_kernel(
    qkv: tl.tensor,
    tiles: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """A tile of queries of one head."""
    STRIDE: tl.constexpr = 3 * HEADS * DIM
    head = tl.program_id(0) % HEADS
    tile = tiles + 3 * (tl.program_id(0) // HEADS)
    begin = tl.load(tile)
    end = tl.load(tile + 1)
    if begin >= end:
        return
    patch = tl.load(tile + 2) + tl.arange(0, BLOCK_M)
    live = (patch < end)[:, None]
    own = qkv + (patch.to(tl.int64) * STRIDE)[:, None] + head * DIM
    d = tl.arange(0, MAIN)[None, :]
    # of a head that is not as long as its padded parts
    in_main = d < DIM
    q = tl.load(own + d, mask=live & in_main if MAIN > DIM else live, other=0.0)
    if REST > 0:
        e = MAIN + tl.arange(0, REST)[None, :]
        in_rest = e < DIM
        q_rest = tl.load(own + e, mask=live & in_rest, other=0.0)
        acc_rest = tl.zeros([BLOCK_M, REST], tl.float32)
    if WIDEN:
        q = q.to(tl.float32)
        if REST > 0:
            q_rest = q_rest.to(tl.float32)
    most = tl.full([BLOCK_M], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, MAIN], tl.float32)
    for first in range(begin, end, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        there = (key < end)[:, None]
        keys = qkv + (key.to(tl.int64) * STRIDE)[:, None] + (HEADS + head) * DIM
        k = tl.load(keys + d, mask=there & in_main if MAIN > DIM else there, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if REST > 0:
            k_rest = tl.load(keys + e, mask=there & in_rest, other=0.0).to(q.dtype)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
        scores = tl.where((key < end)[None, :], scores, -float("inf"))
        weights, factor, most, total = weigh(scores, scale, most, total)
        values = keys + HEADS * DIM
        v = tl.load(values + d, mask=there & in_main if MAIN > DIM else there, other=0.0).to(q.dtype)
        acc = tl.dot(weights.to(q.dtype), v, acc * factor[:, None], input_precision="ieee")
        if REST > 0:
            v_rest = tl.load(values + e, mask=there & in_rest, other=0.0).to(q.dtype)
            acc_rest = tl.dot(weights.to(q.dtype), v_rest, acc_rest * factor[:, None], input_precision="ieee")
    to = out + (patch.to(tl.int64) * HEADS * DIM)[:, None] + head * DIM
    result = acc / total[:, None]
    tl.store(to + d, result.to(out.dtype.element_ty), mask=live & in_main if MAIN > DIM else live)
    if REST > 0:
        result_rest = acc_rest / total[:, None]
        tl.store(to + e, result_rest.to(out.dtype.element_ty), mask=live & in_rest)
