"""Products with weights of 8-bit floats (e4m3), whose inputs are rounded to such floats, too.

A weight [N, K] has a float32 scale for every `rows` x `columns` block. These are the checkpoint's blocks of 128 x 128,
or single outputs (a whole tensor's scale is repeated). Inputs get a scale for each row (`token`), for each row and 128
columns (`group`), or one that the checkpoint brings (`static`).

On a GPU blocks are multiplied by our own kernel, and outputs' scales by `torch._scaled_mm`. Elsewhere the same numbers
are multiplied in float32, which is slow: it shows what rounding the inputs does to answers.

Inputs of experts are not rounded: a step waits for weights, and these are read as 8 bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import nn
from torch.nn import functional as F

from vlmserve_common.compute.expert_part import ExpertPart

FP8 = torch.float8_e4m3fn
MOST = 448.0
"""The largest number of that type."""
GROUP = 128
"""Columns of x that share a scale, and columns of a block that our kernel knows."""
FP8_CAPABILITY = (8, 9)
"""The least compute capability of GPUs that convert and multiply such floats."""
_SMALLEST_SCALE = 1e-12  # of rows that are zero
_SMALLEST_STEP = 32  # inputs that our kernel multiplies at a time, at the least
_ALIGNED = 16  # what torch._scaled_mm wants sizes to be multiples of

Inputs: TypeAlias = Literal["token", "group", "static"]


class Fp8Scales(nn.Module):
    """The scales of a `Linear`'s 8-bit weight. dtype: computed in; see the module docstring.

    Uninitialised; on the current default device.
    """

    def __init__(
        self, weight_shape: tuple[int, int], rows: int, columns: int, inputs: Inputs, dtype: torch.dtype
    ) -> None:
        super().__init__()
        outer, inner = weight_shape
        shape = (-(-outer // rows), -(-inner // columns))
        self.weights = nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=False)
        self.input = (
            nn.Parameter(torch.empty(1, dtype=torch.float32), requires_grad=False) if inputs == "static" else None
        )
        self.rows, self.columns, self.inputs, self.dtype = rows, columns, inputs, dtype

    def of_rows(self, rows: slice) -> torch.Tensor:
        """Return a view of the scales of some outputs. These begin with a block, and end with one or are the last."""
        return self.weights[rows.start // self.rows : -(-rows.stop // self.rows)]

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x [M, K], weight e4m3 [N, K], bias [N] -> [M, N], in x's dtype."""
        if not x.is_cuda:
            return self.emulated(x, weight, bias)
        from vlmserve_common.kernels.gpu import fp8 as kernels

        if self.inputs == "group":
            return kernels.block_linear(x, weight, self.weights, bias, rows=self.rows)
        numbers, scales = kernels.quantize(x, x.shape[1], self.input)
        return scaled_product(numbers, scales, weight, self.weights, bias, x.dtype)

    def emulated(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`forward` in float32, on any device."""
        inner = x.shape[1]
        group = GROUP if self.inputs == "group" else inner
        numbers, scales = quantize(x, group, self.input)
        inputs = numbers.float() * scales.repeat_interleave(group, 1)[:, :inner]
        wide = dequantize_(weight.float(), self.weights, self.rows, self.columns)
        return F.linear(inputs, wide, None if bias is None else bias.float()).to(x.dtype)


def scaled_product(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """e4m3 [M, K] and its scales [M, 1], e4m3 [N, K] and its scales [N, 1], bias [N] -> [M, N] of dtype."""
    return torch._scaled_mm(numbers, weight.t(), scales, weight_scales.t(), bias=bias, out_dtype=dtype)


def can_multiply(
    device: torch.device, weight_shape: tuple[int, int], rows: int, columns: int, inputs: Inputs, dtype: torch.dtype
) -> bool:
    """Return whether a GPU multiplies such weights as they are."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        return False
    if inputs == "group":
        return columns == GROUP
    aligned = all(size % _ALIGNED == 0 for size in weight_shape)
    return rows == 1 and columns == weight_shape[1] and aligned and dtype == torch.bfloat16


def quantize(x: torch.Tensor, group: int, scale: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] -> e4m3 [M, K] and float32 [M, ceil(K / group)]; scale: float32 [1], for all of them."""
    rows, inner = x.shape
    groups = -(-inner // group)
    wide = F.pad(x.float(), (0, groups * group - inner)).view(rows, groups, group)
    if scale is None:
        scales = (wide.abs().amax(-1) / MOST).clamp_(min=_SMALLEST_SCALE)
    else:
        scales = scale.expand(rows, groups).contiguous()
    numbers = (wide / scales[..., None]).clamp_(-MOST, MOST).to(FP8)
    return numbers.view(rows, -1)[:, :inner].contiguous(), scales


def dequantize_(weight: torch.Tensor, scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Multiply weight [N, K] by the scales [ceil(N / rows), ceil(K / columns)] of its blocks, in place; no copy of its
    size is made."""
    if rows == 1 and columns >= weight.shape[1]:
        return weight.mul_(scales)
    for index, own in enumerate(scales):
        weight[index * rows : (index + 1) * rows].mul_(own.repeat_interleave(columns)[: weight.shape[1]])
    return weight


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks:
    """Outputs and inputs of an expert's weight that share a scale."""

    outputs: int
    inputs: int


class ExpertScales(nn.Module):
    """The scales of experts' 8-bit weights: float32 [slots, ceil(outputs / block), ceil(inputs / block)] for gate_up
    and for down. stored: the blocks of whole experts, of `size` inputs.

    Uninitialised; on the current default device. A part's blocks are smaller if its elements begin within a block.
    """

    def __init__(self, part: ExpertPart, size: int, stored: tuple[Blocks, Blocks]) -> None:
        super().__init__()
        gate_up, down = stored
        self.gate_up_blocks = Blocks(outputs=math.gcd(gate_up.outputs, part.first, part.size), inputs=gate_up.inputs)
        self.down_blocks = Blocks(outputs=down.outputs, inputs=math.gcd(down.inputs, part.first) or down.inputs)
        slots = len(part.own)
        self.gate_up = _uninitialised(slots, 2 * part.size, size, self.gate_up_blocks)
        self.down = _uninitialised(slots, size, part.size, self.down_blocks)

    def spread(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a scale for every element of a slot's gate_up and down."""
        found = []
        for scales, blocks in ((self.gate_up, self.gate_up_blocks), (self.down, self.down_blocks)):
            rows = scales[slot].repeat_interleave(blocks.outputs, 0)
            found.append(rows.repeat_interleave(blocks.inputs, 1))
        return found[0], found[1]

    def can_be_multiplied(self, device: torch.device) -> bool:
        """Return whether a GPU multiplies by such weights as they are."""
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
            return False
        return all(step_of(blocks.inputs, 128) >= _SMALLEST_STEP for blocks in (self.gate_up_blocks, self.down_blocks))


def step_of(inputs: int, most: int) -> int:
    """Return the largest power of two up to `most` that divides a block of so many inputs."""
    return math.gcd(inputs, most)


def _uninitialised(slots: int, outputs: int, inputs: int, blocks: Blocks) -> nn.Parameter:
    shape = (slots, -(-outputs // blocks.outputs), -(-inputs // blocks.inputs))
    return nn.Parameter(torch.empty(shape, dtype=torch.float32), requires_grad=False)
