"""Attention inside segments of a packed batch, in pieces."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional as F

from vision.towers.grids import Segments, StaticSegments
from vision.towers.pieces import TORCH_ROWS, Kind, Piece, PieceLimits, Steps, even_tiles, limited_tiles
from vlmserve_common.compute.rotary import Rotation, rotate
from vlmserve_common.kernels.fused import gpu_kernels_work
from vlmserve_common.kernels.segment_attention import BLOCK_PATCHES, SegmentAttention, can_attend

# Rotating and packing a patch takes as long as attending to this many keys.
_PACK_KEYS = 64


def attention_cost(rows: float, length: float, width: int) -> float:
    """Return the cost of `rows` patches that attend to segments of `length` patches. `width`: elements of all heads
    together."""
    return 4.0 * width * rows * (length + _PACK_KEYS)


def segment_attention(
    qkv: torch.Tensor, rotary: Rotation | None, segments: Segments | StaticSegments, limits: PieceLimits
) -> Steps[torch.Tensor]:
    """Let each patch attend to its own segment: unrotated qkv [P, 3, heads, dim] -> [P, heads, dim] in its dtype.

    `rotary`: float32 cos and signed sin [P, 1, dim]; None: nothing turns. qkv may be overwritten.
    """
    if isinstance(segments, StaticSegments):
        assert rotary is not None
        return segments.attend(qkv, rotary)
    if qkv.is_cuda and gpu_kernels_work(qkv.device, qkv.dtype, qkv.shape[-1]):
        return (yield from by_gpu_kernels(qkv, rotary, segments))
    out = qkv.new_empty(qkv[:, 0].shape)
    if can_attend(qkv):
        yield from _by_operators(qkv, rotary, segments, limits, out)
    else:
        yield from _by_torch(qkv, rotary, segments, out)
    return out


def by_gpu_kernels(qkv: torch.Tensor, rotary: Rotation | None, segments: Segments) -> Steps[torch.Tensor]:
    """Attend in two launches, whatever the segments' lengths; qkv is overwritten.

    Long segments use these kernels, too. torch's attention would pad heads of 72 or 80 elements to 96 or 128, and needs
    segments grouped by length. A CUDA graph of it could not serve grids of another shape.
    """
    from vlmserve_common.kernels.gpu.segments import segment_attention as attend_segments
    from vlmserve_common.kernels.gpu.segments import tile_rows, turn

    _, _, heads, dim = qkv.shape
    rows = tile_rows(qkv.dtype, max(segments.lengths))
    yield Piece(Kind.ATTENTION, sum(attention_cost(length, length, heads * dim) for length in segments.lengths))
    if rotary is not None:
        turn(qkv, *rotary)
    return attend_segments(qkv, segments.tiles(rows), rows)


def _by_operators(
    qkv: torch.Tensor, rotary: Rotation | None, segments: Segments, limits: PieceLimits, out: torch.Tensor
) -> Steps[None]:
    """Attend to some segments at a time, or with some queries of a long one."""
    width = out[0].numel()
    turning: tuple[torch.Tensor | None, torch.Tensor | None] = rotary or (None, None)
    first = 0
    while first < len(segments.lengths):
        limit = limits(Kind.ATTENTION)
        last, cost = first + 1, attention_cost(segments.lengths[first], segments.lengths[first], width)
        while last < len(segments.lengths):
            more = attention_cost(segments.lengths[last], segments.lengths[last], width)
            if cost + more > limit:
                break
            last, cost = last + 1, cost + more
        bounds = segments.bounds[first : last + 1]
        begin, end = int(bounds[0]), int(bounds[-1])
        if cost <= limit:
            yield Piece(Kind.ATTENTION, cost)
            attention = SegmentAttention(qkv, *turning, bounds, out)
            attention.pack(begin, end)
            attention.attend(0, attention.pieces)
        else:
            attention = SegmentAttention(qkv, *turning, bounds, out)
            yield from _one_by_operators(attention, begin, end - begin, width, limits)
        first = last


def _one_by_operators(
    attention: SegmentAttention, begin: int, length: int, width: int, limits: PieceLimits
) -> Steps[None]:
    packing = attention_cost(1, 0, width)
    for tile in limited_tiles(length, packing, limits, Kind.ATTENTION, multiple=BLOCK_PATCHES):
        yield Piece(Kind.ATTENTION, packing * (tile.stop - tile.start))
        attention.pack(begin + tile.start, begin + tile.stop)
    attending = (attention_cost(length, length, width) - packing * length) / attention.pieces
    for tile in limited_tiles(attention.pieces, attending, limits, Kind.ATTENTION, multiple=attention.threads):
        yield Piece(Kind.ATTENTION, attending * (tile.stop - tile.start))
        attention.attend(tile.start, tile.stop)


def _by_torch(qkv: torch.Tensor, rotary: Rotation | None, segments: Segments, out: torch.Tensor) -> Steps[None]:
    """Attend with torch. On a CPU the tiles never change; see `pieces`."""
    count, _, heads, dim = qkv.shape
    rows = TORCH_ROWS if qkv.is_cpu else count
    # on a CPU torch attends in float32, and is slower from 16 bits
    dtype = torch.float32 if qkv.is_cpu else qkv.dtype
    parts = torch.empty(count, 3 * heads, dim, dtype=dtype, device=qkv.device)
    for tile in even_tiles(count, rows):
        yield Piece(Kind.ELEMENTS, 3.0 * heads * dim * (tile.stop - tile.start))
        parts[tile] = qkv[tile].flatten(1, 2)
        if rotary is not None:
            turned = parts[tile, : 2 * heads]
            turned.copy_(rotate(turned.float(), *(part[tile] for part in rotary)))
    for length, chosen in _chosen(segments, rows):
        several = parts[chosen].unflatten(0, (-1, length)).transpose(1, 2)
        keys, values = several[:, heads : 2 * heads], several[:, 2 * heads :]
        attended = out[chosen].unflatten(0, (-1, length))
        for tile in even_tiles(length, rows):
            yield Piece(Kind.ATTENTION, attention_cost(len(several) * (tile.stop - tile.start), length, heads * dim))
            queries = several[:, :heads, tile]
            attended[:, tile] = F.scaled_dot_product_attention(queries, keys, values).transpose(1, 2).to(out.dtype)
        if isinstance(chosen, torch.Tensor):  # of which `attended` is a copy
            out[chosen] = attended.flatten(0, 1)


def _chosen(segments: Segments, rows: int) -> Iterator[tuple[int, slice | torch.Tensor]]:
    """Yield lengths of segments, each with the rows of some segments of that length."""
    for length, chosen in segments.groups:
        step = max(1, rows // length) * length
        if isinstance(chosen, torch.Tensor):
            yield from ((length, part) for part in chosen.split(step))
        else:
            for first in range(chosen.start, chosen.stop, step):
                yield length, slice(first, min(first + step, chosen.stop))
