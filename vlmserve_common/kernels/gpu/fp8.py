"""Products of 8-bit floats (e4m3) whose blocks have scales, and the rounding of their inputs.

A tile of the product is summed over blocks of 128 columns: each block's sum, which the tensor cores make, is multiplied
by its two scales and added in float32. Inputs are rounded before, in a launch of its own: a product would round
them again for each tile of outputs, between loads that should follow one another closely.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from vlmserve_common.compute.fp8 import FP8, GROUP
from vlmserve_common.kernels.gpu.common import INTERPRETED, banded_tile, rounded

_ROUNDED = 16  # groups that a program rounds
_MOST, _SMALLEST = tl.constexpr(448.0), tl.constexpr(1e-12)


@triton.jit(do_not_specialize=["total"])
def quantize_kernel(
    x_ptr: tl.tensor,
    x_stride: tl.tensor,
    numbers_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    given_ptr: tl.tensor,
    total: tl.tensor,
    inner: tl.tensor,
    groups: tl.tensor,
    GROUP_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    GIVEN: tl.constexpr,
) -> None:
    """COUNT of all `total` groups of all rows: numbers [M, inner], scales [M, groups]. GIVEN: a scale for all."""
    index = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    row = (index // groups).to(tl.int64)
    within = tl.arange(0, BLOCK)
    columns = (index % groups)[:, None] * GROUP_SIZE + within[None, :]
    mask = (index < total)[:, None] & (within < GROUP_SIZE)[None, :] & (columns < inner)
    x = tl.load(x_ptr + row[:, None] * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    if GIVEN:
        scale = tl.zeros((COUNT,), dtype=tl.float32) + tl.load(given_ptr)
    else:
        scale = tl.maximum(tl.div_rn(tl.max(tl.abs(x), 1), _MOST), _SMALLEST)
    x = tl.div_rn(x, tl.broadcast_to(scale[:, None], (COUNT, BLOCK)))
    x = tl.minimum(tl.maximum(x, -_MOST), _MOST)
    tl.store(numbers_ptr + row[:, None] * inner + columns, rounded(x, tl.float8e4nv), mask=mask)
    tl.store(scales_ptr + index, scale, mask=index < total)


@triton.jit(do_not_specialize=["total"])
def block_linear_kernel(
    x_ptr: tl.tensor,
    x_stride: tl.tensor,
    x_scales_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    total: tl.tensor,
    outer: tl.tensor,
    inner: tl.tensor,
    groups: tl.tensor,
    SCALE_ROWS: tl.constexpr,
    BIAS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BAND: tl.constexpr,
) -> None:
    """A tile [M, N] of out = x @ weight^T + bias."""
    tile_m, tile_n = banded_tile(total, outer, M, N, BAND)
    rows, outputs = tile_m * M + tl.arange(0, M), tile_n * N + tl.arange(0, N)
    columns = tl.arange(0, K)
    row_mask, output_mask = rows < total, outputs < outer
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * x_stride + columns[None, :]
    weight_ptrs = weight_ptr + outputs.to(tl.int64)[None, :] * inner + columns[:, None]
    SAME: tl.constexpr = SCALE_ROWS % N == 0  # all outputs of a tile have one scale
    if SAME:
        scale_ptrs = scales_ptr + tile_n * N // SCALE_ROWS * groups
    else:
        scale_ptrs = scales_ptr + (outputs // SCALE_ROWS) * groups
    sums = tl.zeros((M, N), dtype=tl.float32)
    for group in range(groups):
        left = inner - group * K
        weight = tl.load(weight_ptrs, mask=output_mask[None, :] & (columns < left)[:, None], other=0.0)
        x = tl.load(x_ptrs, mask=row_mask[:, None] & (columns < left)[None, :], other=0.0)
        x_scale = tl.load(x_scales_ptr + rows * groups + group, mask=row_mask, other=0.0)
        if INTERPRETED:
            product = tl.dot(x.to(tl.float32), weight.to(tl.float32))
        else:
            product = tl.dot(x, weight)
        if SAME:
            sums += product * (x_scale * tl.load(scale_ptrs + group))[:, None]
        else:
            scale = tl.load(scale_ptrs + group, mask=output_mask, other=0.0)
            sums += product * (x_scale[:, None] * scale[None, :])
        x_ptrs += K
        weight_ptrs += K
    if BIAS:
        sums += tl.load(bias_ptr + outputs, mask=output_mask, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * outer + outputs[None, :]
    tl.store(out_ptrs, sums.to(out_ptr.dtype.element_ty), mask=row_mask[:, None] & output_mask[None, :])


def quantize(x: torch.Tensor, group: int, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """See `compute.fp8.quantize`; x may have a stride between rows."""
    rows, inner = x.shape
    groups = triton.cdiv(inner, group)
    numbers = torch.empty((rows, inner), dtype=FP8, device=x.device)
    scales = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    block, count, warps = rounding_of(group)
    quantize_kernel[(triton.cdiv(rows * groups, count),)](
        x,
        x.stride(0),
        numbers,
        scales,
        scale,
        rows * groups,
        inner,
        groups,
        GROUP_SIZE=group,
        BLOCK=block,
        COUNT=count,
        GIVEN=scale is not None,
        num_warps=warps,
    )
    return numbers, scales


def block_linear(
    x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, *, rows: int
) -> torch.Tensor:
    """x [M, K], weight e4m3 [N, K], scales float32 [ceil(N / rows), ceil(K / 128)], bias [N] -> [M, N] in x's dtype."""
    total, inner = x.shape
    outer = len(weight)
    out = torch.empty((total, outer), dtype=x.dtype, device=x.device)
    numbers, input_scales = quantize(x, GROUP)
    tiling = tiling_of(total, rows)
    grid = (triton.cdiv(total, tiling["M"]) * triton.cdiv(outer, tiling["N"]),)
    block_linear_kernel[grid](
        numbers,
        numbers.stride(0),
        input_scales,
        weight,
        scales,
        bias,
        out,
        total,
        outer,
        inner,
        scales.shape[1],
        SCALE_ROWS=rows,
        BIAS=bias is not None,
        INTERPRETED=INTERPRETED,
        K=GROUP,
        **tiling,
    )
    return out


def tiling_of(total: int, scale_rows: int) -> dict[str, Any]:
    """Tile sizes and launch options for so many rows of x: small tiles where reading weights is all there is to do.

    A scale for each output takes registers, too.
    """
    if total <= 16:
        return {"M": 16, "N": 32, "BAND": 1, "num_warps": 4, "num_stages": 6}
    if total <= 64:
        return {"M": 64, "N": 64, "BAND": 1, "num_warps": 4, "num_stages": 5}
    return {"M": 128, "N": 64 if scale_rows == 1 else 128, "BAND": 8, "num_warps": 8, "num_stages": 4}


def rounding_of(group: int) -> tuple[int, int, int]:
    """For groups of so many columns: columns of a block, groups and warps of a program."""
    block = triton.next_power_of_2(group)
    return block, _ROUNDED if block <= GROUP else 1, 4 if block <= 4096 else 8
