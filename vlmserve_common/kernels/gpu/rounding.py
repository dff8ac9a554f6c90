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
    """x float32, not beyond the largest of `dtype`, to the nearest of `dtype`, the even one of two."""
    if _INTERPRETED and dtype == tl.bfloat16:
        out = _shortened(x, 16).to(dtype)
    elif _INTERPRETED and dtype == tl.float8e4nv:
        out = _as_float8(x).to(dtype, bitcast=True)
    else:
        out = x.to(dtype)
    return out


@triton.jit
def _as_float8(x: tl.tensor) -> tl.tensor:
    """x float32 as an 8-bit float's uint8."""
    size = tl.abs(x)
    # below 2^-6 the steps are 2^-9, counted: adding 2^23 leaves no fractions; from there on the exponent's bias is 7
    steps = ((size * 512.0 + 8388608.0) - 8388608.0).to(tl.int32)
    code = tl.where(size < 0.015625, steps, (_shortened(size, 20).to(tl.int32, bitcast=True) >> 20) - (120 << 3))
    code = tl.where(x == x, code, 0x7F)
    return (code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _shortened(x: tl.tensor, bits: tl.constexpr) -> tl.tensor:
    """x float32 rounded such that its last bits are 0."""
    whole = x.to(tl.int32, bitcast=True)
    whole += (1 << (bits - 1)) - 1 + ((whole >> bits) & 1)
    return ((whole >> bits) << bits).to(tl.float32, bitcast=True)
