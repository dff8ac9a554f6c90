"""Rounding where torch rounds: products are not fused with sums, and float32 is converted as on a GPU under Triton's
interpreter too, which cuts bfloat16 off and rounds 8-bit floats wrongly."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import triton
import triton.language as tl

from vlmserve_common.kernels.gpu.interpreter import INTERPRETED

OPTIONS: Mapping[str, bool] = MappingProxyType({"enable_fp_fusion": False})
"""Of a launch."""
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def rounded(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """x float32 to the nearest of `dtype`, the even one of two."""
    if _INTERPRETED:
        if dtype == tl.bfloat16:
            x = _shortened(x, 16)
        elif dtype == tl.float8e4nv:
            # below 2^-6 the steps are 2^-9: adding 2^14 leaves no finer bits
            size = tl.abs(x)
            size = tl.where(size < 0.015625, (size + 16384.0) - 16384.0, _shortened(size, 20))
            x = tl.where(x.to(tl.int32, bitcast=True) < 0, -size, size)  # zeros have signs too
    return x.to(dtype)


@triton.jit
def _shortened(x: tl.tensor, bits: tl.constexpr) -> tl.tensor:
    """x float32 rounded such that its last bits are 0."""
    whole = x.to(tl.int32, bitcast=True)
    whole += (1 << (bits - 1)) - 1 + ((whole >> bits) & 1)
    return ((whole >> bits) << bits).to(tl.float32, bitcast=True)
