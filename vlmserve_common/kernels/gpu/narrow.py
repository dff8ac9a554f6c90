"""Rounding to 8-bit floats (e4m3) inside kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_fp8(x: tl.tensor, INTERPRETED: tl.constexpr) -> tl.tensor:
    """float32 to e4m3, to the nearest, beyond 448 to 448. The interpreter loses the carry of what is rounded up to a
    power of two: it gets numbers that need no rounding."""
    x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    if INTERPRETED:
        exponent = (x.to(tl.int32, bitcast=True) >> 23) & 255
        # of the last of its digits: three behind the first, and no smaller than 2^-9
        step = ((tl.maximum(exponent, 127 - 6) - 3) << 23).to(tl.float32, bitcast=True)
        magic = 1.5 * 2**23  # adding it leaves no digits behind the point
        x = ((x / step + magic) - magic) * step
    return x.to(tl.float8e4nv)
