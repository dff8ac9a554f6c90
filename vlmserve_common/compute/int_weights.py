"""Weights that stay whole numbers of 4 or 8 bits, and which of them do.

A CPU has operators for them (`kernels.quantized`), a GPU has `kernels.gpu.int_linear` in Triton. Everywhere else, and
where sizes do not fit, such weights are dequantised as they are loaded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from vlmserve_common.kernels import fused
from vlmserve_common.kernels.quantized import QuantizedWeight, can_pack_quantized

_STEP, _WIDE_STEP = 128, 32  # inputs that a kernel multiplies at a time, at the most; in float32
_LEAST = 16  # ... in one product on the tensor cores, at the least
_DTYPES = (torch.float32, torch.bfloat16)  # of the CPU's operators

Way = Literal["operators", "triton"]


@dataclass(frozen=True, kw_only=True, slots=True)
class IntForm:
    """A weight [outer, inner] of whole numbers of `bits` bits, for x of `dtype`. Each `group` inputs share a scale; the
    last group may be smaller."""

    outer: int
    inner: int
    bits: int
    group: int
    dtype: torch.dtype

    @property
    def step(self) -> int:
        """The inputs that a kernel multiplies at a time: a power of two, all of one group."""
        most = _WIDE_STEP if self.dtype == torch.float32 else _STEP
        return math.gcd(self.inner, min(self.group, self.inner), most)

    @property
    def groups(self) -> int:
        """The groups of inputs."""
        return -(-self.inner // self.group)

    def way(self, device: torch.device) -> Way | None:
        """Return what multiplies by such a weight on a device as it is; None for nothing."""
        if device.type == "cpu" and self.dtype in _DTYPES and can_pack_quantized(self.bits, self.inner, self.group):
            return "operators"
        return "triton" if fused.active_on(device) and self.step * self.bits // 8 >= _LEAST else None


class IntWeights(nn.Module):
    """`count` weights [outer, inner] of one form, with a scale and a zero for each output and group of inputs.

    Uninitialised; on the current default device. numbers: uint8 [count, outer, inner * bits / 8]. Of 4 bits, each
    `step` inputs lie in step / 2 bytes: the first half in the low bits of all bytes, the other half in the high bits.
    So a kernel needs no shuffling. scales: float16 [count, groups, outer]; zeros: int16, alike.
    """

    def __init__(self, form: IntForm, count: int = 1) -> None:
        super().__init__()
        self.form, self.count = form, count

        def uninitialised(*shape: int, dtype: torch.dtype) -> nn.Parameter:
            return nn.Parameter(torch.empty(count, *shape, dtype=dtype), requires_grad=False)

        self.numbers = uninitialised(form.outer, form.inner * form.bits // 8, dtype=torch.uint8)
        self.scales = uninitialised(form.groups, form.outer, dtype=torch.float16)
        self.zeros = uninitialised(form.groups, form.outer, dtype=torch.int16)

    def fill(self, index: int, weight: QuantizedWeight) -> None:
        """Take a weight of this form as number `index`."""
        form, numbers = self.form, weight.numbers
        assert (weight.bits, weight.group) == (form.bits, form.group)
        if form.bits == 4:
            low, high = numbers.view(form.outer, -1, 2, form.step // 2).unbind(2)
            numbers = (low | (high << 4)).flatten(1)
        self.numbers[index].copy_(numbers)
        self.scales[index].copy_(weight.scales.t())
        self.zeros[index].copy_(weight.zeros.t())

    def dequantized(self, index: int, dtype: torch.dtype) -> torch.Tensor:
        """Return weight number `index` as plain numbers [outer, inner]."""
        form, numbers = self.form, self.numbers[index]
        if form.bits == 4:
            halves = numbers.view(form.outer, -1, form.step // 2)
            numbers = torch.stack((halves & 15, halves >> 4), dim=2).flatten(1)
        scales, zeros = self.scales[index].t(), self.zeros[index].t()
        weight = QuantizedWeight(numbers=numbers, scales=scales, zeros=zeros, bits=form.bits, group=form.group)
        return weight.dequantize().to(dtype)

    def product(self, x: torch.Tensor, bias: torch.Tensor | None = None, *, index: int = 0) -> torch.Tensor:
        """x [M, inner] times weight number `index` transposed, plus bias [outer] -> [M, outer], in x's dtype."""
        x = x.contiguous()
        if not fused.usable(x):
            return F.linear(x, self.dequantized(index, x.dtype), bias)
        from vlmserve_common.kernels.gpu.int_linear import int_linear  # not where there is no Triton

        return int_linear(x, self, bias, index=index)


class ExpertInts(nn.Module):
    """The weights of experts: gates and ups, one below the other, and down. A slot has its expert's."""

    def __init__(self, gate_up: IntWeights, down: IntWeights) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down
