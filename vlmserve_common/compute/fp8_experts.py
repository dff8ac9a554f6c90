"""Experts whose weights are 8-bit floats (e4m3), with a scale for every block, output or expert (see `compute.fp8`).

Inputs are not rounded: a step waits for weights, and these are read as 8 bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from vlmserve_common.compute.expert_part import ExpertPart
from vlmserve_common.compute.fp8 import FP8_CAPABILITY

_SMALLEST_STEP = 32  # inputs that our kernel multiplies at a time, at the least


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
