"""Softmax over keys that come block by block (Milakov and Gimelshein 2018), for attention kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def weigh(
    scores: tl.tensor, scale: tl.tensor, most: tl.tensor, total: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """A block's scores float32 [M, N], -inf for keys that a query does not see, times scale > 0 are logarithms to 2.

    most, total [M]: of the blocks before, the largest logarithm and the sum of weights relative to it; -inf and 0 at
    first, when each query must see a key. Returns weights [M, N], the factor [M] for what was summed before, and most
    and total with this block.
    """
    larger = tl.maximum(most, tl.max(scores, 1) * scale)
    factor = tl.exp2(most - larger)
    weights = tl.exp2(scores * scale - larger[:, None])
    return weights, factor, larger, total * factor + tl.sum(weights, 1)
