"""What adapters add to packed products; see `cpp/lora.cpp`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from dataclasses import dataclass

import numpy as np
import torch

from vlmserve_common.kernels.library import operators, pointer
from vlmserve_common.kernels.packed_linear import column_order

_LANES = 16


@dataclass(frozen=True, kw_only=True)
class PackedFactors:
    """An adapter's factors for one packed product, as the library reads them.

    a: [whole, inner]. b: [blocks, rank, 16], blocks of outputs in packed order. parts: int32 [blocks], which `rank`
    rows of a each block takes; None: the first ones.
    """

    a: torch.Tensor
    b: torch.Tensor
    parts: torch.Tensor | None


class FactorsStruct(ctypes.Structure):
    """A `PackedFactors` as the library's functions get it; see `cpp/operators.h`."""

    _fields_ = [("a", c_void_p), ("b", c_void_p), ("parts", c_void_p), ("rank", c_int64), ("whole", c_int64)]


def pack_factors(a: torch.Tensor, b: torch.Tensor, sizes: Sequence[int], *, gated: bool) -> PackedFactors:
    """a [parts * rank, inner], b [outputs, rank], whose outputs are parts of these sizes -> a copy for `added`."""
    order = column_order(len(b), gated=gated)
    parts = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)[np.maximum(order, 0)].reshape(-1, _LANES)
    parts = np.where(order.reshape(parts.shape) < 0, parts[:, :1], parts)
    rank = b.shape[1]
    if (parts != parts[:, :1]).any():  # a block of several parts: each part's own columns, and zeros in the others
        spread = b.new_zeros(len(b), len(sizes), rank)
        spread[torch.arange(len(b)), torch.from_numpy(np.repeat(np.arange(len(sizes)), sizes))] = b
        b, parts = spread.flatten(1), np.zeros_like(parts)
    columns = torch.cat([b, b.new_zeros(1, b.shape[1])])[torch.from_numpy(order)]  # -1 is the zeros at the end
    return PackedFactors(
        a=a.contiguous(),
        b=columns.view(-1, _LANES, b.shape[1]).transpose(1, 2).contiguous(),
        parts=torch.from_numpy(parts[:, 0].copy()) if parts.any() else None,
    )


def structs(factors: Sequence[PackedFactors | None]) -> ctypes.Array[FactorsStruct]:
    """Return the structs of some adapters' factors, which must outlast them. None: an adapter without any."""
    return (FactorsStruct * len(factors))(*(FactorsStruct() if one is None else _struct(one) for one in factors))


def _struct(one: PackedFactors) -> FactorsStruct:
    return FactorsStruct(one.a.data_ptr(), one.b.data_ptr(), pointer(one.parts), one.b.shape[1], len(one.a))


def added(x: torch.Tensor, factors: Sequence[PackedFactors | None], rows: np.ndarray) -> torch.Tensor:
    """Return what adapters add to a packed product of x [M, inner]: float32 [M, packed outputs].

    factors: of each adapter; at least one has some. rows: int32 [M], the number of each row's adapter; -1 for none.
    """
    blocks = next(len(one.b) for one in factors if one is not None)
    out = torch.empty((len(x), blocks * _LANES), dtype=torch.float32)
    rows, passed = np.ascontiguousarray(rows, dtype=np.int32), structs(factors)
    operators().vs_lora(
        int(x.dtype == torch.bfloat16),
        x.data_ptr(),
        len(x),
        x.shape[1],
        x.stride(0),
        rows.ctypes.data,
        ctypes.addressof(passed),
        len(factors),
        blocks,
        out.data_ptr(),
    )
    return out
