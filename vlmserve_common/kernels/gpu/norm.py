"""RMSNorm, alone or behind a sum. Rounded as in `compute.layers`: the sum, the quotient and the product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vlmserve_common.kernels.gpu.common import rounded

_ELEMENTS_A_WARP = 512  # two loads of 16 bytes a thread, of 16-bit elements


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., size] / rms(x) * weight [size]; contiguous, of one dtype (float32, bfloat16, float16)."""
    return _normalise(x, None, weight, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm` of x + residual, a new tensor; residual, of x's shape and dtype, becomes the sum."""
    return _normalise(x, residual, weight, eps)


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
