"""The gate of a SwiGLU (Shazeer 2020). It rounds where torch does: the activated gate, then the product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vlmserve_common.kernels.gpu.common import rounded

_BLOCK, _WARPS = 1024, 4  # a load of 16 bytes a thread, of 16-bit elements


def silu_mul(product: torch.Tensor) -> torch.Tensor:
    """Contiguous [N, 2 * size], gates first -> silu(gates) * rest [N, size]; float32, bfloat16 or float16."""
    rows, size = product.shape[0], product.shape[1] // 2
    out = product.new_empty(rows, size)
    if rows:
        silu_mul_kernel[(rows, triton.cdiv(size, _BLOCK))](
            product, out, size, BLOCK=_BLOCK, num_warps=_WARPS, enable_fp_fusion=False
        )
    return out


@triton.jit
def silu_mul_kernel(product: tl.tensor, out: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    """A stretch of a row a program."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    dtype: tl.constexpr = product.dtype.element_ty
    gates = tl.load(product + row * 2 * size + columns, mask=inside, other=0.0).to(tl.float32)
    rest = tl.load(product + row * 2 * size + size + columns, mask=inside, other=0.0).to(tl.float32)
    gates = rounded(gates / (1.0 + tl.exp(-gates)), dtype).to(tl.float32)
    tl.store(out + row * size + columns, rounded(gates * rest, dtype), mask=inside)
