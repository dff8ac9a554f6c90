"""A random choice from log-probabilities: Gumbel noise made of a counter's hash, added, and the largest of a row.

The formula of the noise is the same as in `executor.sampler`, in the same types: int64, float64, then float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK, _WARPS = 2048, 8
_SPLITS = 128


def choose(
    scores: torch.Tensor, ids: torch.Tensor | None, seeds: torch.Tensor, output_indices: torch.Tensor
) -> torch.Tensor:
    """Return int64 [S]: the token of each row with the largest sum of score and noise, the first of equals. scores:
    float32 [S, V], contiguous. ids: int64 [S, V], the tokens; None: the columns' numbers. seeds, output_indices: int64
    [S]."""
    rows, width = scores.shape
    splits = triton.cdiv(width, _BLOCK)
    best = scores.new_empty(rows, splits)
    tokens = torch.empty(rows, splits, dtype=torch.int64, device=scores.device)
    out = torch.empty(rows, dtype=torch.int64, device=scores.device)
    if rows:
        noisy_best_kernel[(rows, splits)](
            scores,
            ids,
            seeds,
            output_indices,
            best,
            tokens,
            width,
            IDS=ids is not None,
            BLOCK=_BLOCK,
            num_warps=_WARPS,
            enable_fp_fusion=False,
        )
        best_of_splits_kernel[(rows,)](
            best, tokens, out, splits, BLOCK=_splits_block(splits), num_warps=1, enable_fp_fusion=False
        )
    return out


def _splits_block(splits: int) -> int:
    """The same for all that requests may ask for, up to a vocabulary of 2**18."""
    return max(_SPLITS, int(triton.next_power_of_2(splits)))


@triton.jit(do_not_specialize=["width"])
def noisy_best_kernel(
    scores: tl.tensor,
    ids: tl.tensor,
    seeds: tl.tensor,
    output_indices: tl.tensor,
    best: tl.tensor,
    tokens: tl.tensor,
    width: tl.tensor,
    IDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The best of a stretch of a row a program."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = split * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    token = column.to(tl.int64)
    if IDS:
        token = tl.load(ids + row * width + column, mask=inside, other=0)
    stream = _mixed(_mixed(_stepped(tl.load(seeds + row), 1)) + _stepped(0, tl.load(output_indices + row)))
    bits = _mixed(_stepped(stream, token))
    uniform = (((bits >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) + 0.5) * 1.1102230246251565e-16
    noise = -tl.log(-tl.log(uniform)).to(tl.float32)
    score = tl.load(scores + row * width + column, mask=inside, other=-float("inf"))
    value, place = tl.max(score + noise, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best + row * tl.num_programs(1) + split, value)
    # in a row of which nothing is left the first is chosen
    chosen = tl.sum(tl.where(tl.arange(0, BLOCK) == place, token, 0), axis=0)
    tl.store(tokens + row * tl.num_programs(1) + split, chosen)


@triton.jit(do_not_specialize=["splits"])
def best_of_splits_kernel(
    best: tl.tensor, tokens: tl.tensor, out: tl.tensor, splits: tl.tensor, BLOCK: tl.constexpr
) -> None:
    """A row a program."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK)
    values = tl.load(best + row * splits + split, mask=split < splits, other=-float("inf"))
    _, place = tl.max(values, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(out + row, tl.load(tokens + row * splits + place))


@triton.jit
def _stepped(start: tl.tensor, steps: tl.tensor) -> tl.tensor:
    """SplitMix64's counter, int64: `steps` odd constants behind `start`."""
    return start + steps * tl.full((), -7046029254386353131, tl.int64)


@triton.jit
def _mixed(x: tl.tensor) -> tl.tensor:
    """SplitMix64's finalizer on int64 bit patterns (arithmetic shifts masked into logical ones)."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * tl.full((), -4658895280553007687, tl.int64)
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * tl.full((), -7723592293110705685, tl.int64)
    return x ^ ((x >> 31) & 0x1FFFFFFFF)
