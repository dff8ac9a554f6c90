"""A sparse MLP: grouped products over the rows of a `routing.Plan`, and the sum over each token's experts.

Each block of rows is multiplied by its expert's weights, which are read once for it. A token's sum is in the order of
its scores; the batch decides only the size of tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vlmserve_common.compute.fp8 import Blocks, ExpertScales, step_of
from vlmserve_common.compute.int_weights import IntWeights
from vlmserve_common.kernels.gpu.common import INTERPRETED, rounded
from vlmserve_common.kernels.gpu.int_linear import int_grouped
from vlmserve_common.kernels.gpu.routing import make_plan

_COLUMNS = 1024  # of a row that a program adds up


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Rows of a block, outputs of a program (gates and as many ups), inputs of a step; warps, stages of a pipeline."""

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


def tile_for(rows: int, experts: int, dtype: torch.dtype, *, gated: bool) -> Tile:
    """For so many rows in all. Few rows an expert only wait for its weights: small tiles, many loads on their way."""
    if dtype == torch.float32:
        return Tile(rows=16, outputs=32, inputs=32, warps=4, stages=2)  # on no tensor core
    if rows <= 16 * experts:
        return Tile(rows=16, outputs=32 if gated else 64, inputs=128, warps=4, stages=4)
    if rows <= 64 * experts:
        return Tile(rows=64, outputs=64 if gated else 128, inputs=64, warps=4, stages=4)
    return Tile(rows=128, outputs=64 if gated else 128, inputs=64, warps=8, stages=4)


def run_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    scores: torch.Tensor,
    gate_up: torch.Tensor | IntWeights,
    down: torch.Tensor | IntWeights,
    residual: torch.Tensor | None = None,
    fp8: ExpertScales | None = None,
) -> torch.Tensor:
    """Return residual + the sum over each token's experts, times their scores [N, chosen], for x [N, size]: [N, size].
    ids: int32 [N, chosen], the experts; ids below 0 are not here.

    gate_up [experts, 2 * inner, size], gates first, for SiLU; down [experts, size, inner]: of x's dtype, any strides.
    fp8: they are 8-bit floats, with such scales. Or both are whole numbers of a few bits.
    """
    (tokens, size), chosen = x.shape, ids.shape[1]
    if isinstance(down, IntWeights):
        experts, inner = down.count, down.form.inner
    else:
        experts, _, inner = down.shape
    out = torch.empty_like(x)
    if not tokens:
        return out
    rows = ids.numel()
    plan = make_plan(ids, experts, tile_for(rows, experts, x.dtype, gated=True).rows)
    inside, made = x.new_empty(rows, inner), x.new_empty(rows, size)
    for weights, source, target, gated in ((gate_up, x, inside, True), (down, inside, made, False)):
        tile = tile_for(rows, experts, x.dtype, gated=gated)
        if isinstance(weights, IntWeights):
            options = {"num_warps": tile.warps, "num_stages": tile.stages}
            sizes = {"ROWS": tile.rows, "OUTPUTS": tile.outputs, **options}
            int_grouped(source, weights, target, plan, chosen=chosen, gated=gated, tile=sizes)
            continue
        outputs = target.shape[1]
        blocks, scales, strides = Blocks(outputs=1, inputs=tile.inputs), weights, (0, 0)
        if fp8 is not None:
            blocks, scales = (fp8.gate_up_blocks, fp8.gate_up) if gated else (fp8.down_blocks, fp8.down)
            strides = scales.stride(0), scales.stride(1)
        grouped_kernel[len(plan.blocks), triton.cdiv(outputs, tile.outputs)](
            source,
            weights,
            target,
            plan.order,
            plan.blocks,
            outputs,
            source.shape[1],
            *weights.stride(),
            scales,
            *strides,
            CHOSEN=chosen,
            GATED=gated,
            SCALED=fp8 is not None,
            SCALE_OUTPUTS=blocks.outputs,
            SCALE_INPUTS=blocks.inputs,
            ROWS=tile.rows,
            OUTPUTS=tile.outputs,
            INPUTS=step_of(blocks.inputs, tile.inputs),
            WIDEN=INTERPRETED and x.dtype == torch.bfloat16,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    sum_kernel[tokens, triton.cdiv(size, _COLUMNS)](
        made,
        ids,
        scores,
        out if residual is None else residual,
        out,
        size,
        CHOSEN=chosen,
        ADDED=residual is not None,
        COLUMNS=_COLUMNS,
        num_warps=4,
    )
    return out


@triton.jit
def grouped_kernel(
    x: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    order: tl.tensor,
    blocks: tl.tensor,
    outputs: tl.tensor,
    inputs: tl.tensor,
    expert_stride: tl.tensor,
    output_stride: tl.tensor,
    input_stride: tl.tensor,
    scales: tl.tensor,
    expert_scales: tl.tensor,
    output_scales: tl.tensor,
    CHOSEN: tl.constexpr,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    SCALE_OUTPUTS: tl.constexpr,
    SCALE_INPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """Multiply a block's rows, for some outputs.

    GATED: x has tokens, and out is in the plan's order. Otherwise x is in the plan's order, and out in the rows' order.
    SCALED: weights are 8-bit floats, and OUTPUTS by INPUTS of them share a scale.
    """
    block = blocks + tl.program_id(0) * 3
    count = tl.load(block + 2)
    if count == 0:
        return
    within, columns = tl.arange(0, ROWS), tl.arange(0, INPUTS)
    places = tl.load(block + 1) + within
    rows = tl.load(order + places, mask=within < count, other=0)
    channels = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    sources, targets = (rows // CHOSEN, places) if GATED else (places, rows)
    x_ptrs = x + sources.to(tl.int64)[:, None] * inputs + columns[None, :]
    w_ptrs = weights + tl.load(block).to(tl.int64) * expert_stride
    w_ptrs += channels[None, :] * output_stride + columns[:, None] * input_stride
    s_ptrs = scales + tl.load(block).to(tl.int64) * expert_scales
    sums = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    if GATED:
        ups = tl.zeros((ROWS, OUTPUTS), dtype=tl.float32)
    for first in range(0, inputs, INPUTS):
        left = columns < inputs - first
        x_part = tl.load(x_ptrs, mask=(within < count)[:, None] & left[None, :], other=0.0)
        w_mask = (channels < outputs)[None, :] & left[:, None]
        w_part = tl.load(w_ptrs, mask=w_mask, other=0.0)
        if SCALED:
            column = s_ptrs + first // SCALE_INPUTS
            scale = tl.load(column + channels // SCALE_OUTPUTS * output_scales, mask=channels < outputs, other=0.0)
            sums += _scaled(x_part, w_part, scale, WIDEN)
        else:
            sums = _add(x_part, w_part, sums, WIDEN)
        if GATED:
            w_part = tl.load(w_ptrs + outputs * output_stride, mask=w_mask, other=0.0)
            if SCALED:
                place = (channels + outputs) // SCALE_OUTPUTS
                scale = tl.load(column + place * output_scales, mask=channels < outputs, other=0.0)
                ups += _scaled(x_part, w_part, scale, WIDEN)
            else:
                ups = _add(x_part, w_part, ups, WIDEN)
        x_ptrs += INPUTS
        w_ptrs += INPUTS * input_stride
    if GATED:
        sums = sums / (1.0 + tl.exp(-sums)) * ups
    out_ptrs = out + targets.to(tl.int64)[:, None] * outputs + channels[None, :]
    mask = (within < count)[:, None] & (channels < outputs)[None, :]
    tl.store(out_ptrs, rounded(sums, out.dtype.element_ty), mask=mask)


@triton.jit
def _add(x: tl.tensor, weights: tl.tensor, sums: tl.tensor, WIDEN: tl.constexpr) -> tl.tensor:
    if WIDEN:
        x, weights = x.to(tl.float32), weights.to(tl.float32)
    return tl.dot(x, weights, sums, input_precision="ieee")


@triton.jit
def _scaled(x: tl.tensor, weights: tl.tensor, scale: tl.tensor, WIDEN: tl.constexpr) -> tl.tensor:
    """The product with 8-bit floats, which x's type has exactly, times a scale for each output."""
    if WIDEN:
        return tl.dot(x.to(tl.float32), weights.to(tl.float32), input_precision="ieee") * scale[None, :]
    return tl.dot(x, weights.to(x.dtype), input_precision="ieee") * scale[None, :]


@triton.jit
def sum_kernel(
    made: tl.tensor,
    ids: tl.tensor,
    scores: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    size: tl.tensor,
    CHOSEN: tl.constexpr,
    ADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """A stretch of a token a program."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < size
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for place in tl.static_range(CHOSEN):
        row = token * CHOSEN + place
        part = tl.load(made + row * size + columns, mask=inside, other=0.0).to(tl.float32)
        # nothing was made of a row whose expert is elsewhere
        total += tl.where(tl.load(ids + row) >= 0, tl.load(scores + row).to(tl.float32) * part, 0.0)
    if ADDED:
        total += tl.load(residual + token * size + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * size + columns, rounded(total, out.dtype.element_ty), mask=inside)
