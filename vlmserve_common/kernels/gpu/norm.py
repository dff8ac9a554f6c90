"""RMSNorm, alone, behind a sum, or in front of a gate. Rounded as in `compute.layers`: the sum, the quotient and the
product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vlmserve_common.kernels.gpu.common import rounded

_ELEMENTS_A_WARP = 512  # two loads of 16 bytes a thread, of 16-bit elements
_GATED_ROWS = 8  # heads of a program


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., size] / rms(x) * weight [size]; contiguous, of one dtype (float32, bfloat16, float16)."""
    return _normalise(x, None, weight, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm` of x + residual, a new tensor; residual, of x's shape and dtype, becomes the sum."""
    return _normalise(x, residual, weight, eps)


def gated_rms_norm(
    x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float, *, sigmoid: bool
) -> torch.Tensor:
    """`rms_norm` of x [N, heads, size] times act(gate [N, heads, size]), where act is SiLU or the sigmoid. Heads of a
    row of `gate` are contiguous, and its rows lie apart by any stride."""
    out = torch.empty_like(x)
    rows, heads, size = x.shape
    assert gate[:1].is_contiguous()
    if rows:
        gated_rms_norm_kernel[(triton.cdiv(rows * heads, _GATED_ROWS),)](
            x,
            weight,
            gate,
            gate.stride(0),
            out,
            eps,
            rows * heads,
            HEADS=heads,
            SIZE=size,
            SIGMOID=sigmoid,
            ROWS=_GATED_ROWS,
            BLOCK=triton.next_power_of_2(size),
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out


def _normalise(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = torch.empty_like(x)
    size = x.shape[-1]
    if x.numel():
        block = triton.next_power_of_2(size)
        rms_norm_kernel[(x.numel() // size,)](
            x,
            residual,
            weight,
            out,
            eps,
            size,
            ADD=residual is not None,
            BLOCK=block,
            num_warps=_warps(block),
            enable_fp_fusion=False,
        )
    return out


def _warps(block: int) -> int:
    return min(16, max(1, block // _ELEMENTS_A_WARP))


@triton.jit
def rms_norm_kernel(
    x: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    size: tl.tensor,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A row a program."""
    row = tl.program_id(0).to(tl.int64) * size
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    dtype: tl.constexpr = x.dtype.element_ty
    wide = tl.load(x + row + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        wide += tl.load(residual + row + columns, mask=inside, other=0.0).to(tl.float32)
        total = rounded(wide, dtype)
        tl.store(residual + row + columns, total, mask=inside)
        wide = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / size + eps)
    quotient = rounded(wide * scale, dtype).to(tl.float32)
    factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + columns, rounded(quotient * factor, dtype), mask=inside)


@triton.jit(do_not_specialize=["total"])
def gated_rms_norm_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    gate: tl.tensor,
    gate_stride: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    total: tl.tensor,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    SIGMOID: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """ROWS of all `total` heads of all rows a program."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    inside = (row < total)[:, None] & (columns < SIZE)[None, :]
    dtype: tl.constexpr = x.dtype.element_ty
    at = row.to(tl.int64)[:, None] * SIZE + columns[None, :]
    wide = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / SIZE + eps)
    quotient = rounded(wide * scale[:, None], dtype).to(tl.float32)
    factor = tl.load(weight + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    product = rounded(quotient * factor[None, :], dtype).to(tl.float32)
    gates = gate + ((row // HEADS).to(tl.int64) * gate_stride + row % HEADS * SIZE)[:, None] + columns[None, :]
    opening = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    closed = 1.0 + tl.exp(-opening)
    opening = 1.0 / closed if SIGMOID else opening / closed
    tl.store(out + at, rounded(product * opening, dtype), mask=inside)
