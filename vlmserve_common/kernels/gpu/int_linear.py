"""Products with weights of whole numbers of 4 or 8 bits (`compute.int_weights.IntWeights`): of a layer, and grouped by
expert.

A tile of numbers is read as it is stored. Less their zeros, the numbers are exact in x's type, and the tensor cores
multiply by them. The sum of each step of inputs is then multiplied by its scales and added in float32. So nothing is
rounded that the checkpoint did not round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from vlmserve_common.kernels.gpu.common import INTERPRETED, banded_tile, rounded

if TYPE_CHECKING:
    from vlmserve_common.compute.int_weights import IntWeights
    from vlmserve_common.kernels.gpu.routing import Plan


@triton.jit(do_not_specialize=["total"])
def int_linear_kernel(
    x_ptr: tl.tensor,
    numbers_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    total: tl.tensor,
    outer: tl.tensor,
    inner: tl.tensor,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
    BITS: tl.constexpr,
    BIAS: tl.constexpr,
    WIDEN: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    BAND: tl.constexpr,
) -> None:
    """A tile [M, N] of out = x @ weight^T + bias."""
    BYTES: tl.constexpr = STEP * BITS // 8
    tile_m, tile_n = banded_tile(total, outer, M, N, BAND)
    rows, outputs = tile_m * M + tl.arange(0, M), tile_n * N + tl.arange(0, N)
    places = tl.arange(0, BYTES)
    row_mask, output_mask = rows < total, outputs < outer
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * inner + places[None, :]
    number_ptrs = numbers_ptr + outputs.to(tl.int64)[None, :] * (inner * BITS // 8) + places[:, None]
    sums = tl.zeros((M, N), dtype=tl.float32)
    for first in range(0, inner, STEP):
        at = first // GROUP * outer + outputs
        numbers = tl.load(number_ptrs, mask=output_mask[None, :], other=0)
        scale = tl.load(scales_ptr + at, mask=output_mask, other=0.0)
        zero = tl.load(zeros_ptr + at, mask=output_mask, other=0)
        x = tl.load(x_ptrs, mask=row_mask[:, None], other=0.0)
        high = x
        if BITS == 4:
            high = tl.load(x_ptrs + BYTES, mask=row_mask[:, None], other=0.0)
        sums += _step(x, high, numbers, scale, zero, BITS, WIDEN)
        x_ptrs += STEP
        number_ptrs += BYTES
    if BIAS:
        sums += tl.load(bias_ptr + outputs, mask=output_mask, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * outer + outputs[None, :]
    mask = row_mask[:, None] & output_mask[None, :]
    tl.store(out_ptrs, rounded(sums, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def int_grouped_kernel(
    x: tl.tensor,
    numbers_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    zeros_ptr: tl.tensor,
    out: tl.tensor,
    order: tl.tensor,
    blocks: tl.tensor,
    outputs: tl.tensor,
    inner: tl.tensor,
    groups: tl.tensor,
    CHOSEN: tl.constexpr,
    GATED: tl.constexpr,
    GROUP: tl.constexpr,
    STEP: tl.constexpr,
    BITS: tl.constexpr,
    WIDEN: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
) -> None:
    """Multiply a block's rows, for some outputs; see `experts.grouped_kernel`. outputs: of out; GATED: the weights have
    as many gates, and then as many ups."""
    BYTES: tl.constexpr = STEP * BITS // 8
    PARTS: tl.constexpr = 2 if GATED else 1
    block = blocks + tl.program_id(0) * 3
    count = tl.load(block + 2)
    if count == 0:
        return
    expert = tl.load(block).to(tl.int64)
    within, bytes_ = tl.arange(0, ROWS), tl.arange(0, BYTES)
    places = tl.load(block + 1) + within
    rows = tl.load(order + places, mask=within < count, other=0)
    channels = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    sources, targets = (rows // CHOSEN, places) if GATED else (places, rows)
    row_mask, mask = (within < count)[:, None], channels < outputs
    width, whole = inner * BITS // 8, PARTS * outputs
    x_ptrs = x + sources.to(tl.int64)[:, None] * inner + bytes_[None, :]
    number_ptrs = numbers_ptr + (expert * whole + channels[None, :]) * width + bytes_[:, None]
    first_scale = expert * groups * whole
    sums = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    if GATED:
        ups = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for first in range(0, inner, STEP):
        at = first_scale + first // GROUP * whole + channels
        x_part = tl.load(x_ptrs, mask=row_mask, other=0.0)
        high = x_part
        if BITS == 4:
            high = tl.load(x_ptrs + BYTES, mask=row_mask, other=0.0)
        numbers = tl.load(number_ptrs, mask=mask[None, :], other=0)
        scale = tl.load(scales_ptr + at, mask=mask, other=0.0)
        zero = tl.load(zeros_ptr + at, mask=mask, other=0)
        sums += _step(x_part, high, numbers, scale, zero, BITS, WIDEN)
        if GATED:
            numbers = tl.load(number_ptrs + outputs.to(tl.int64) * width, mask=mask[None, :], other=0)
            scale = tl.load(scales_ptr + at + outputs, mask=mask, other=0.0)
            zero = tl.load(zeros_ptr + at + outputs, mask=mask, other=0)
            ups += _step(x_part, high, numbers, scale, zero, BITS, WIDEN)
        x_ptrs += STEP
        number_ptrs += BYTES
    if GATED:
        sums = sums / (1.0 + tl.exp(-sums)) * ups
    out_ptrs = out + targets.to(tl.int64)[:, None] * outputs + channels[None, :]
    tl.store(out_ptrs, rounded(sums, out.dtype.element_ty), mask=row_mask & mask[None, :])


@triton.jit
def _step(
    x: tl.tensor,
    high: tl.tensor,
    numbers: tl.tensor,
    scale: tl.tensor,
    zero: tl.tensor,
    BITS: tl.constexpr,
    WIDEN: tl.constexpr,
) -> tl.tensor:
    """Multiply a step of inputs by numbers uint8 [BYTES, N], whose scale and zero [N] they share. Of 4 bits, x has the
    inputs of the low bits, and high those of the high bits."""
    if WIDEN:
        x, high = x.to(tl.float32), high.to(tl.float32)
    if BITS == 4:
        low_part = ((numbers & 15).to(tl.int16) - zero[None, :]).to(x.dtype)
        high_part = ((numbers >> 4).to(tl.int16) - zero[None, :]).to(x.dtype)
        product = tl.dot(x, low_part, input_precision="ieee")
        product = tl.dot(high, high_part, product, input_precision="ieee")
    else:
        product = tl.dot(x, (numbers.to(tl.int16) - zero[None, :]).to(x.dtype), input_precision="ieee")
    return product * scale.to(tl.float32)[None, :]


def int_linear(x: torch.Tensor, weights: IntWeights, bias: torch.Tensor | None, *, index: int = 0) -> torch.Tensor:
    """x [M, K], contiguous, times weight number `index`, and bias [N] -> [M, N] in x's dtype."""
    total, form = len(x), weights.form
    out = torch.empty((total, form.outer), dtype=x.dtype, device=x.device)
    if not total:
        return out
    tiling = tiling_of(total, x.dtype)
    grid = (triton.cdiv(total, tiling["M"]) * triton.cdiv(form.outer, tiling["N"]),)
    int_linear_kernel[grid](
        x,
        weights.numbers[index],
        weights.scales[index],
        weights.zeros[index],
        bias,
        out,
        total,
        form.outer,
        form.inner,
        BIAS=bias is not None,
        **_constants(weights, x.dtype),
        **tiling,
    )
    return out


def int_grouped(
    x: torch.Tensor,
    weights: IntWeights,
    out: torch.Tensor,
    plan: Plan,
    *,
    chosen: int,
    gated: bool,
    tile: dict[str, int],
) -> None:
    """Multiply rows by their experts' weights; see `experts.run_experts`. tile: ROWS, OUTPUTS, and launch options."""
    form, outputs = weights.form, out.shape[1]
    int_grouped_kernel[len(plan.blocks), triton.cdiv(outputs, tile["OUTPUTS"])](
        x,
        weights.numbers,
        weights.scales,
        weights.zeros,
        out,
        plan.order,
        plan.blocks,
        outputs,
        form.inner,
        form.groups,
        CHOSEN=chosen,
        GATED=gated,
        **_constants(weights, x.dtype),
        **tile,
    )


def _constants(weights: IntWeights, dtype: torch.dtype) -> dict[str, Any]:
    form = weights.form
    widen = INTERPRETED and dtype == torch.bfloat16
    return {"GROUP": min(form.group, form.inner), "STEP": form.step, "BITS": form.bits, "WIDEN": widen}


def tiling_of(total: int, dtype: torch.dtype) -> dict[str, Any]:
    """Tile sizes and launch options for so many rows of x: small tiles where reading weights is all there is to do."""
    if dtype == torch.float32:  # on no tensor core
        return {"M": 16, "N": 32, "BAND": 1, "num_warps": 4, "num_stages": 2}
    if total <= 16:
        return {"M": 16, "N": 32, "BAND": 1, "num_warps": 4, "num_stages": 8}
    if total <= 64:
        return {"M": 64, "N": 64, "BAND": 1, "num_warps": 4, "num_stages": 4}
    return {"M": 128, "N": 128, "BAND": 8, "num_warps": 8, "num_stages": 3}
