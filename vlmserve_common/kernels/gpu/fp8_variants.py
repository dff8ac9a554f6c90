"""The kernels of `fp8` as an 8B model's layers launch them."""

from __future__ import annotations

import torch

from vlmserve_common.compute.tensors import dtype_name
from vlmserve_common.kernels.gpu import fp8
from vlmserve_common.kernels.gpu.variant import Variant, pointer

_FP8, _FLOATS, _MULTIPLE = pointer(fp8.FP8), pointer(torch.float32), "i32:16"
_HIDDEN, _INTERMEDIATE = 4096, 12288


def _linear(dtype: torch.dtype, total: int, rows: int, *, bias: bool) -> Variant:
    tiling = fp8.tiling_of(total, rows)
    what = f"{total} rows, blocks of {rows} outputs{', bias' if bias else ''}"
    return Variant(
        name=f"fp8 linear: {dtype_name(dtype)}, {what}",
        kernel=fp8.block_linear_kernel,
        signature={
            "x_ptr": _FP8,
            "x_stride": _MULTIPLE,
            "x_scales_ptr": _FLOATS,
            "weight_ptr": _FP8,
            "scales_ptr": _FLOATS,
            "out_ptr": pointer(dtype),
            "total": "i32",
            "outer": _MULTIPLE,
            "inner": _MULTIPLE,
            "groups": _MULTIPLE,
        }
        | ({"bias_ptr": pointer(dtype)} if bias else {}),
        constexprs={
            "SCALE_ROWS": rows,
            "BIAS": bias,
            "INTERPRETED": False,
            "K": fp8.GROUP,
            **{name: tiling[name] for name in ("M", "N", "BAND")},
        }
        | ({} if bias else {"bias_ptr": None}),
        num_warps=tiling["num_warps"],
        num_stages=tiling["num_stages"],
    )


def _quantize(dtype: torch.dtype, group: int, *, given: bool) -> Variant:
    block, count, warps = fp8.rounding_of(group)
    return Variant(
        name=f"fp8 quantize: {dtype_name(dtype)}, groups of {group}{', scale given' if given else ''}",
        kernel=fp8.quantize_kernel,
        signature={
            "x_ptr": pointer(dtype),
            "x_stride": _MULTIPLE,
            "numbers_ptr": _FP8,
            "scales_ptr": _FLOATS,
            "total": "i32",
            "inner": _MULTIPLE,
            "groups": "i32",
        }
        | ({"given_ptr": _FLOATS} if given else {}),
        constexprs={"GROUP_SIZE": group, "BLOCK": block, "COUNT": count, "GIVEN": given}
        | ({} if given else {"given_ptr": None}),
        num_warps=warps,
    )


CATALOGUE: tuple[Variant, ...] = (
    *(_linear(torch.bfloat16, total, rows, bias=False) for total in (1, 64, 8192) for rows in (128, 1)),
    *(_linear(torch.bfloat16, total, 128, bias=True) for total in (1, 8192)),
    _linear(torch.float16, 1, 128, bias=False),
    _linear(torch.float32, 1, 128, bias=False),
    *(_quantize(torch.bfloat16, group, given=False) for group in (fp8.GROUP, _HIDDEN, _INTERMEDIATE)),
    _quantize(torch.bfloat16, _INTERMEDIATE, given=True),
    _quantize(torch.float16, fp8.GROUP, given=False),
)
