"""What adapters add to products: a shrink to their ranks and an expansion, each row with its own adapter's factors.

Factors of different adapters have different ranks and lie anywhere, so kernels get tables of addresses. Sums are
float32; the result is rounded once, and a row's does not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vlmserve_common.kernels.gpu.common import rounded

_RANKS, _INPUTS, _OUTPUTS = 16, 256, 256  # of a program


@dataclass(frozen=True, kw_only=True)
class DeviceFactors:
    """An adapter's factors for one product: a [parts * rank, inputs], b [rank, outputs], contiguous, on the device.

    parts: int32 [outputs], which `rank` rows of a each output takes.
    """

    a: torch.Tensor
    b: torch.Tensor
    parts: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class FactorsTable:
    """The factors of several adapters for one product. addresses: int64 [2, adapters], of a and b; ranks: int32 [2,
    adapters], rows of a and of b; 0 for an adapter without any. parts: of `DeviceFactors`. most: the most rows of a.
    factors: what it keeps alive."""

    addresses: torch.Tensor
    ranks: torch.Tensor
    parts: torch.Tensor
    most: int
    factors: tuple[DeviceFactors | None, ...] = ()

    @classmethod
    def of(cls, factors: Sequence[DeviceFactors | None], device: torch.device) -> FactorsTable:
        """Make the table on the device."""
        addresses = [(0, 0) if one is None else (one.a.data_ptr(), one.b.data_ptr()) for one in factors]
        ranks = [(0, 0) if one is None else (len(one.a), len(one.b)) for one in factors]
        return cls(
            factors=tuple(factors),
            addresses=torch.tensor(addresses, dtype=torch.int64).t().contiguous().to(device),
            ranks=torch.tensor(ranks, dtype=torch.int32).t().contiguous().to(device),
            parts=next(one.parts for one in factors if one is not None),
            most=max(whole for whole, _ in ranks),
        )


def added(x: torch.Tensor, table: FactorsTable, rows: torch.Tensor) -> torch.Tensor:
    """Return what adapters add to a product of x [M, inputs], contiguous: [M, outputs] in x's dtype. rows: int32 [M],
    the number of each row's adapter; -1 for none."""
    tokens, inputs, outputs = len(x), x.shape[1], len(table.parts)
    inner = torch.empty(tokens, table.most, dtype=torch.float32, device=x.device)
    out = x.new_empty(tokens, outputs)
    if tokens:
        addresses, ranks = table.addresses, table.ranks
        shrink_kernel[tokens, triton.cdiv(table.most, _RANKS)](
            x, rows, addresses[0], ranks[0], inner, inputs, table.most, RANKS=_RANKS, INPUTS=_INPUTS, num_warps=4
        )
        expand_kernel[tokens, triton.cdiv(outputs, _OUTPUTS)](
            inner, rows, addresses[1], ranks[1], table.parts, out, outputs, table.most, OUTPUTS=_OUTPUTS, num_warps=4
        )
    return out


@triton.jit
def shrink_kernel(
    x: tl.tensor,
    rows: tl.tensor,
    addresses: tl.tensor,
    ranks: tl.tensor,
    inner: tl.tensor,
    inputs: tl.tensor,
    most: tl.tensor,
    RANKS: tl.constexpr,
    INPUTS: tl.constexpr,
) -> None:
    """Some of a row's inner numbers a program."""
    row = tl.program_id(0).to(tl.int64)
    own = tl.load(rows + row)
    rank = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    whole = tl.load(ranks + own, mask=own >= 0, other=0)
    if tl.program_id(1) * RANKS < whole:
        a = tl.load(addresses + own).to(tl.pointer_type(x.dtype.element_ty))
        total = tl.zeros((RANKS,), tl.float32)
        for start in range(0, inputs, INPUTS):
            column = start + tl.arange(0, INPUTS)
            here = column < inputs
            values = tl.load(x + row * inputs + column, mask=here, other=0.0).to(tl.float32)
            factors = tl.load(
                a + rank[:, None].to(tl.int64) * inputs + column[None, :],
                mask=(rank[:, None] < whole) & here[None, :],
                other=0.0,
            ).to(tl.float32)
            total += tl.sum(factors * values[None, :], 1)
        tl.store(inner + row * most + rank, total, mask=rank < whole)


@triton.jit
def expand_kernel(
    inner: tl.tensor,
    rows: tl.tensor,
    addresses: tl.tensor,
    ranks: tl.tensor,
    parts: tl.tensor,
    out: tl.tensor,
    outputs: tl.tensor,
    most: tl.tensor,
    OUTPUTS: tl.constexpr,
) -> None:
    """A stretch of a row's outputs a program."""
    row = tl.program_id(0).to(tl.int64)
    own = tl.load(rows + row)
    column = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    here = column < outputs
    rank = tl.load(ranks + own, mask=own >= 0, other=0)
    dtype: tl.constexpr = out.dtype.element_ty
    total = tl.zeros((OUTPUTS,), tl.float32)
    if rank > 0:
        b = tl.load(addresses + own).to(tl.pointer_type(dtype)) + column
        numbers = inner + row * most + tl.load(parts + column, mask=here, other=0) * rank
        for _ in range(rank):
            total += tl.load(numbers, mask=here, other=0.0) * tl.load(b, mask=here, other=0.0).to(tl.float32)
            b += outputs
            numbers += 1
    tl.store(out + row * outputs + column, rounded(total, dtype), mask=here)
