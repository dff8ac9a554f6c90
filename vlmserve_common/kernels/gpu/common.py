"""Parts that the kernels' modules share: the order of tiles, rounding and softmax inside kernels.

Triton's interpreter runs the kernels where there is no GPU. Two of its operations differ from a GPU's. Its `tl.dot` is
exact in float32 and float16 and plainly wrong in bfloat16. Its conversion cuts bfloat16 off and rounds 8-bit floats
wrongly.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Whether Triton's interpreter runs the kernels, on a CPU; this is settled when Triton is imported. Kernels that
multiply matrices take it as a constexpr, and widen bfloat16 first if it is true."""
_INTERPRETED = tl.constexpr(INTERPRETED)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of an attention kernel's programs: rows of a tile, keys of a block, warps, stages of the pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int


@triton.jit
def banded_tile(
    total: tl.tensor, outer: tl.tensor, M: tl.constexpr, N: tl.constexpr, BAND: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The row and the column of this program's tile [M, N]. Tiles are taken in bands of BAND rows of tiles, whose
    inputs stay in the L2 cache."""
    tile = tl.program_id(0)
    tiles_m, tiles_n = tl.cdiv(total, M), tl.cdiv(outer, N)
    band = tile // (BAND * tiles_n)
    height = tl.minimum(tiles_m - band * BAND, BAND)
    in_band = tile % (BAND * tiles_n)
    return band * BAND + in_band % height, in_band // height


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


@triton.jit
def weigh(
    scores: tl.tensor, scale: tl.tensor, most: tl.tensor, total: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """A block's scores float32 [M, N], -inf for keys that a query does not see, times scale > 0 are logarithms to 2.

    most, total [M]: of the blocks before, the largest logarithm and the sum of weights relative to it; -inf and 0 at
    first, when each query must see a key. Returns weights [M, N], the factor [M] for earlier sums, and most and total
    with this block.
    """
    larger = tl.maximum(most, tl.max(scores, 1) * scale)
    factor = tl.exp2(most - larger)
    weights = tl.exp2(scores * scale - larger[:, None])
    return weights, factor, larger, total * factor + tl.sum(weights, 1)
