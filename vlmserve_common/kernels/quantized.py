"""Quantised weights: whole numbers with a scale and a zero for each column and group of inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np
import torch

from vlmserve_common.kernels.library import active, multiplies_bytes, operators
from vlmserve_common.kernels.packed_linear import (
    KINDS,
    PANEL,
    Kind,
    PackedWeight,
    column_order,
    packed_bias,
    place_of_rows,
)

Mode = Literal["int8", "int4", "w8a8"]
"""How `--quantization` packs weights. w8a8: int8, and activations are rounded to 8 bits, too."""
MODE_BITS: Mapping[Mode, int] = MappingProxyType({"int8": 8, "int4": 4, "w8a8": 8})
# Ranges that are tried for each group of 4 bits beside the whole one, each 5% narrower than the last.
_NARROWER = 8
INT4_GROUP = 128


@dataclass(frozen=True, kw_only=True)
class QuantizedWeight:
    """A weight [N, K] = scales * (numbers - zeros), with a scale and a zero for each `group` inputs.

    The last group may be smaller. numbers: uint8 [N, K] below 2^bits. scales: float16 [N, groups]. zeros: int16 [N,
    groups]. bits: 4 or 8.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    bits: int
    group: int

    def dequantize(self) -> torch.Tensor:
        """The weight, float32 [N, K]."""
        inner = self.numbers.shape[1]
        scales, zeros = (part.float().repeat_interleave(self.group, 1)[:, :inner] for part in (self.scales, self.zeros))
        return (self.numbers.float() - zeros).mul_(scales)


def tower_mode(quantization: str, device: torch.device) -> Mode | None:
    """Return how a vision tower's weights are packed with this --quantization: as they are, except for w8a8 on a CPU if
    this process has the operators."""
    return "w8a8" if quantization == "w8a8" and device.type == "cpu" and multiplies_bytes() else None


def merged(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Weights with the same inputs and groups, one below the other."""
    first = parts[0]
    assert all((part.bits, part.group) == (first.bits, first.group) for part in parts)
    if len(parts) == 1:
        return first
    return QuantizedWeight(
        numbers=torch.cat([part.numbers for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        zeros=torch.cat([part.zeros for part in parts]),
        bits=first.bits,
        group=first.group,
    )


def can_quantize(weight: torch.Tensor, mode: Mode) -> bool:
    """Whether this process has the library, and it multiplies by such a weight [N, K] in so many bits."""
    plain = weight.is_cpu and weight.dtype in (torch.bfloat16, torch.float32)
    return active() is not None and plain and weight.shape[1] % _multiple(mode) == 0


def quantize(weight: torch.Tensor, mode: Mode) -> QuantizedWeight:
    """Round weight [N, K] to the nearest numbers.

    int8 and w8a8 have a scale for each column, and zeros in the middle. int4 has a scale and a zero for each
    `INT4_GROUP` inputs, those of the range with the least squared error.
    """
    weight = weight.contiguous()
    rows, inner = weight.shape
    bits, group = (4, INT4_GROUP) if mode == "int4" else (8, inner)
    groups = -(-inner // group)
    numbers = torch.empty((rows, inner), dtype=torch.uint8)
    scales, zeros = torch.empty((rows, groups), dtype=torch.float16), torch.empty((rows, groups), dtype=torch.uint8)
    operators().vs_quantise(
        int(weight.dtype == torch.bfloat16),
        weight.data_ptr(),
        rows,
        inner,
        group,
        bits,
        int(mode != "int4"),
        _NARROWER if mode == "int4" else 0,
        numbers.data_ptr(),
        scales.data_ptr(),
        zeros.data_ptr(),
    )
    return QuantizedWeight(numbers=numbers, scales=scales, zeros=zeros.short(), bits=bits, group=group)


def can_pack_quantized(bits: int, inner: int, group: int) -> bool:
    """Whether this process has the library, and it multiplies by a weight of so many inputs with groups of `group`."""
    multiple = _multiple("int4" if bits == 4 else "int8")
    return active() is not None and inner % multiple == 0 and (group % multiple == 0 or group >= inner)


def pack_quantized(
    weight: QuantizedWeight,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    gated: bool = False,
    mode: Mode | None = None,
) -> PackedWeight:
    """A copy for products with x of `dtype`. bias [N]; gated: see `PackedWeight`; mode: w8a8 only for a weight that
    `quantize` made in it."""
    rows, inner = weight.numbers.shape
    order = column_order(rows, gated=gated)
    kind: Kind = mode or ("int4" if weight.bits == 4 else "int8")
    # for each column its numbers and, for each group, a scale and a shift of 16 bits
    data = torch.zeros(len(order) * (inner * weight.bits // 8 + weight.scales.shape[1] * 4), dtype=torch.uint8)
    shifted = _pack_rows(kind, weight, order, data)
    return PackedWeight(
        data=data,
        bias=packed_bias(bias, order),
        kind=kind,
        inner=inner,
        panels=len(order) // PANEL,
        outputs=rows // 2 if gated else rows,
        group=weight.group,
        shifted=shifted or mode == "int4",  # whatever comes in its place
        gated=gated,
        dtype=dtype,
    )


def requantize(packed: PackedWeight, first: int, rows: torch.Tensor, *, index: int = 0) -> None:
    """Do `packed_linear.repack` for a weight that `quantize` made, in the same mode."""
    assert packed.kind != "float32"
    assert packed.kind != "bfloat16"
    place = place_of_rows(packed, first, len(rows), index=index)
    _pack_rows(packed.kind, quantize(rows.to(packed.dtype), packed.kind), place.order, place.panels)


def _pack_rows(kind: Kind, weight: QuantizedWeight, order: np.ndarray, data: torch.Tensor) -> bool:
    """Return whether any zero is not in the middle."""
    # held until the call is over
    numbers, scales = weight.numbers.contiguous(), weight.scales.contiguous()
    shifts = (2 ** (weight.bits - 1) - weight.zeros).half().contiguous()
    operators().vs_pack_quantised(
        KINDS[kind],
        numbers.data_ptr(),
        numbers.shape[1],
        scales.data_ptr(),
        shifts.data_ptr(),
        scales.shape[1],
        order.ctypes.data,
        len(order),
        data.data_ptr(),
    )
    return bool(shifts.any())


def _multiple(mode: Mode) -> int:
    """What inputs come in, at the least."""
    return 8 if mode == "int4" else 4
