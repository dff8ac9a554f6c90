"""The variants in which the attention kernels are met: dtypes, caches, head sizes and groups of published models."""

from __future__ import annotations

import torch

from vlmserve_common.compute.tensors import dtype_name
from vlmserve_common.kernels.gpu import decode, extend, segments
from vlmserve_common.kernels.gpu.common import Variant, pointer

_BF16, _HALF, _FULL = torch.bfloat16, torch.float16, torch.float32
_FP8, _INT8 = torch.float8_e4m3fn, torch.int8
_DTYPES = [(_BF16, _BF16), (_BF16, _FP8), (_BF16, _INT8), (_HALF, _HALF), (_FULL, _FULL)]
"""The dtypes of queries and of the cache."""
_HEADS = [(128, 4), (128, 7), (64, 1), (72, 2), (80, 8), (96, 5), (256, 2)]
"""Elements, and query heads of a KV head."""
_SPLITS = 32
_INTS, _FLOATS = pointer(torch.int32), pointer(torch.float32)


def _paged() -> list[Variant]:
    found = []
    for dtype, stored in _DTYPES:
        for dim, group in _HEADS:
            if dtype == stored == _BF16 or (dim, group) in ((128, 4), (256, 2)):
                found += [_decode(dtype, stored, dim, group, chosen=False), _extend(dtype, stored, dim, group)]
    merges = [_merge(_BF16, dim, splits) for dim, splits in ((128, _SPLITS), (72, 64), (256, 64))]
    return [*found, _decode(_BF16, _BF16, 128, 4, chosen=True), *merges]


def _name(kernel: str, dtype: torch.dtype, stored: torch.dtype, dim: int, group: int) -> str:
    return f"{kernel}: {dtype_name(dtype)}, cache {dtype_name(stored)}, dim {dim}, group {group}"


def _inputs(dtype: torch.dtype, stored: torch.dtype) -> dict[str, str]:
    scales = _FLOATS if stored == _INT8 else _INTS
    return {
        "q": pointer(dtype),
        "keys": pointer(stored),
        "values": pointer(stored),
        "key_scales": scales,
        "value_scales": scales,
        "table": _INTS,
        "req_pool_indices": pointer(torch.int64),
        "seq_lens": _INTS,
        "starts": _INTS,
    }


def _numbers(dim: int) -> dict[str, str]:
    head_stride = "i32:16" if dim % 16 == 0 else "i32"
    return {"scale": "fp32", "q_stride": "i32:16", "q_head_stride": head_stride, "table_stride": "i32"}


def _decode(dtype: torch.dtype, stored: torch.dtype, dim: int, group: int, *, chosen: bool) -> Variant:
    block_n, warps, stages = decode.block_shape(dtype, dim)
    return Variant(
        name=_name("decode, some requests" if chosen else "decode", dtype, stored, dim, group),
        kernel=decode.split_kernel,
        signature={
            **_inputs(dtype, stored),
            "requests": _INTS,
            "partial": _FLOATS,
            "logs": _FLOATS,
            **_numbers(dim),
        },
        constexprs={
            "SPLITS": _SPLITS,
            "SHORTEST": decode.SHORTEST_SPLIT,
            "HEADS": 4 * group,
            "DIM": dim,
            "CHOSEN": chosen,
            "GROUP": group,
            "SCALED": stored == _INT8,
            "BLOCK_N": block_n,
            "BLOCK_D": decode.padded(dim),
            "WIDEN": False,
        },
        num_warps=warps,
        num_stages=stages,
    )


def _merge(dtype: torch.dtype, dim: int, splits: int) -> Variant:
    block_n, _, _ = decode.block_shape(dtype, dim)
    return Variant(
        name=f"merge: {dtype_name(dtype)}, dim {dim}, {splits} splits",
        kernel=decode.merge_kernel,
        signature={
            "partial": _FLOATS,
            "logs": _FLOATS,
            "out": pointer(dtype),
            "seq_lens": _INTS,
            "requests": _INTS,
            "starts": _INTS,
        },
        constexprs={
            "SPLITS": splits,
            "SHORTEST": decode.SHORTEST_SPLIT,
            "HEADS": 32,
            "DIM": dim,
            "CHOSEN": False,
            "BLOCK_D": decode.padded(dim),
            "BLOCK_N": block_n,
        },
        num_warps=decode.merge_warps(splits, dim),
    )


def _extend(dtype: torch.dtype, stored: torch.dtype, dim: int, group: int) -> Variant:
    shape = extend.tile_shape(dtype, dim)
    return Variant(
        name=_name("extend", dtype, stored, dim, group),
        kernel=extend.extend_kernel,
        signature={**_inputs(dtype, stored), "tiles": _INTS, "out": pointer(dtype), **_numbers(dim)},
        constexprs={
            "HEADS": 4 * group,
            "GROUP": group,
            "DIM": dim,
            "SCALED": stored == _INT8,
            "BLOCK_M": shape.rows,
            "BLOCK_N": shape.keys,
            "BLOCK_D": decode.padded(dim),
            "WIDEN": False,
        },
        num_warps=shape.warps,
        num_stages=shape.stages,
    )


def _segments(dtype: torch.dtype, dim: int, rows: int) -> Variant:
    shape = segments.block_shape(dtype, dim, rows)
    main, rest = segments.head_parts(dim)
    return Variant(
        name=f"segments: {dtype_name(dtype)}, dim {dim}, tiles of {rows}",
        kernel=segments.segments_kernel,
        signature={"qkv": pointer(dtype), "tiles": _INTS, "out": pointer(dtype), "scale": "fp32"},
        constexprs={
            "HEADS": 16,
            "DIM": dim,
            "MAIN": main,
            "REST": rest,
            "BLOCK_M": rows,
            "BLOCK_N": shape.keys,
            "WIDEN": False,
        },
        num_warps=shape.warps,
        num_stages=shape.stages,
    )


def _turn(dtype: torch.dtype, dim: int) -> Variant:
    return Variant(
        name=f"turn: {dtype_name(dtype)}, dim {dim}",
        kernel=segments.turn_kernel,
        signature={"qkv": pointer(dtype), "cos": _FLOATS, "signed_sin": _FLOATS, "count": "i32"},
        constexprs={"HEADS": 16, "HALF": dim // 2, "BLOCK": segments.half_block(dim), "ROWS": segments.TURNED_ROWS},
    )


def _vision() -> list[Variant]:
    heads = [(_BF16, 64), (_BF16, 72), (_BF16, 80), (_BF16, 128), (_HALF, 72), (_HALF, 80), (_FULL, 72), (_FULL, 80)]
    attention = [
        _segments(dtype, dim, rows)
        for dtype, dim in heads
        for rows in sorted({segments.tile_rows(dtype, longest) for longest in (64, 65)})
    ]
    return [*attention, *(_turn(dtype, dim) for dtype, dim in heads)]


CATALOGUE: tuple[Variant, ...] = (*_paged(), *_vision())
