"""Quantised weights: whole numbers with a scale and a zero for each column and group of inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch

from vlmserve_common.kernels.library import active, multiplies_bytes, operators
from vlmserve_common.kernels.packed_linear import KINDS, PANEL, Kind, PackedWeight, column_order, packed_bias

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


def can_pack_quantized(weight: QuantizedWeight) -> bool:
    """Whether this process has the library, and it multiplies by such a weight."""
    multiple = _multiple("int4" if weight.bits == 4 else "int8")
    inner = weight.numbers.shape[1]
    return active() is not None and inner % multiple == 0 and (weight.group % multiple == 0 or weight.group >= inner)


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
    groups = weight.scales.shape[1]
    order = column_order(rows, gated=gated)
    kind: Kind = mode or ("int4" if weight.bits == 4 else "int8")
    # held until the call is over
    numbers, scales = weight.numbers.contiguous(), weight.scales.contiguous()
    shifts = (2 ** (weight.bits - 1) - weight.zeros).half().contiguous()
    # for each column its numbers and, for each group, a scale and a shift of 16 bits
    data = torch.empty(len(order) * (inner * weight.bits // 8 + groups * 4), dtype=torch.uint8)
    operators().vs_pack_quantised(
        KINDS[kind],
        numbers.data_ptr(),
        inner,
        scales.data_ptr(),
        shifts.data_ptr(),
        groups,
        order.ctypes.data,
        len(order),
        data.data_ptr(),
    )
    return PackedWeight(
        data=data,
        bias=packed_bias(bias, order),
        kind=kind,
        inner=inner,
        panels=len(order) // PANEL,
        outputs=rows // 2 if gated else rows,
        group=weight.group,
        shifted=bool(shifts.any()),
        gated=gated,
        dtype=dtype,
    )


def _multiple(mode: Mode) -> int:
    """What inputs come in, at the least."""
    return 8 if mode == "int4" else 4
