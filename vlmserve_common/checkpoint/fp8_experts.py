"""Experts of checkpoints whose weights are 8-bit floats.

Each expert's weights are stored under its own name as those of other layers are (`experts.0.gate_proj.weight` and
`...weight_scale_inv`, see `checkpoint.fp8`), or those of all experts in one tensor, `experts.gate_up_proj` and
`experts.down_proj`, beside which `..._scale_inv` or `..._scale` [experts, *blocks] has the same order of dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from vlmserve_common.checkpoint.reader import CheckpointReader, StoredTensor
from vlmserve_common.checkpoint.weights import WeightRules
from vlmserve_common.compute.experts import Experts
from vlmserve_common.compute.fp8 import FP8
from vlmserve_common.compute.fp8_experts import Blocks, ExpertScales
from vlmserve_common.errors import CheckpointError

_GATED = ("gate_proj", "up_proj")
_SCALES = ("weight_scale_inv", "weight_scale")
_OTHERS = (".input_scale", ".activation_scale", "_activation_scale", "_input_scale")


class Fp8Experts:
    """Those of a module on the meta device; see `checkpoint.fp8.Fp8Tensors`. block: rows and columns that share a
    scale; None: outputs, or whole experts do. count, kept: sparse MLPs of such weights, and those that stay so."""

    def __init__(
        self,
        module: nn.Module,
        reader: CheckpointReader,
        rules: WeightRules,
        block: tuple[int, int] | None,
        *,
        device: torch.device,
        keep: bool | None,
    ) -> None:
        self._reader, self._block = reader, block
        self._ours = {rules.our_name(name): stored for name, stored in reader.tensors.items()}
        self.weights: set[str] = set()
        self.stored: set[str] = set()
        self.eight_bit: set[str] = set()
        self.kept = 0
        self._found: dict[str, tuple[Experts, ExpertScales]] = {}
        for name, child in module.named_modules():
            if isinstance(child, Experts):
                self._take(name, child, device, keep)

    @property
    def count(self) -> int:
        """Sparse MLPs of 8-bit floats."""
        return len(self._found)

    def _take(self, name: str, experts: Experts, device: torch.device, keep: bool | None) -> None:
        own = [stored for stored, _ in experts.stored_parameters(name)]
        eight = [stored for stored in own if stored in self._ours and self._ours[stored].dtype == FP8]
        if not eight:
            return
        if len(eight) < len(own):
            raise CheckpointError(
                f"{self._reader.folder}: {len(eight)} of {len(own)} weights of {name} are 8-bit floats; all must be"
            )
        prefix = f"{name}."
        self.eight_bit.update(eight)
        self.stored |= {
            stored.name
            for ours, stored in self._ours.items()
            if ours.startswith(prefix) and (ours.endswith(("_scale_inv", "_scale", *_OTHERS)))
        }
        for stored in own:
            self._check(stored, experts)
        with torch.device("meta"):
            scales = ExpertScales(experts.part, experts.size, (self._blocks(experts, 0), self._blocks(experts, 1)))
        self._found[name] = experts, scales
        if scales.can_be_multiplied(device) if keep is None else keep:
            experts.hold_fp8(scales)
            self.kept += 1
            self.weights |= {f"{name}.fp8.{leaf}" for leaf, _ in scales.named_parameters()}

    def _blocks(self, experts: Experts, which: int) -> Blocks:
        """Of gate_up or down, as whole experts have them."""
        if self._block is None:
            return Blocks(outputs=1, inputs=(experts.size, experts.part.inner)[which])
        rows, columns = self._block
        if experts.layout == "inputs_first":
            rows, columns = columns, rows
        return Blocks(outputs=rows, inputs=columns)

    def _scale_of(self, weight: str) -> StoredTensor:
        names = [weight.removesuffix("weight") + leaf for leaf in _SCALES] if weight.endswith(".weight") else []
        names += [f"{weight}_scale_inv", f"{weight}_scale"]
        found = next((self._ours[name] for name in names if name in self._ours), None)
        if found is None:
            raise CheckpointError(f"{self._reader.folder}: {names[0]} is missing; {weight} is of 8-bit floats")
        return found

    def _check(self, weight: str, experts: Experts) -> None:
        scale, shape = self._scale_of(weight), self._ours[weight].shape
        *outer, rows, columns = shape
        if self._block is not None:
            allowed = [(*outer, -(-rows // self._block[0]), -(-columns // self._block[1]))]
        elif experts.layout == "each":
            allowed = [(rows, 1), (rows,), (1, 1), (1,), ()]
        else:
            outputs = (1, columns) if experts.layout == "inputs_first" else (rows, 1)
            allowed = [(*outer, *outputs), (*outer, 1, 1), (*outer,)]
        if scale.shape not in allowed or not scale.dtype.is_floating_point:
            expected = " or ".join(str(list(one)) for one in allowed)
            raise CheckpointError(
                f"{self._reader.folder}: {scale.name} is {list(scale.shape)} of {scale.dtype}, not {expected} of "
                f"floating-point numbers (blocks of {self._block})"
            )

    def load(self) -> None:
        """Read the scales; weights that are not kept as they are are multiplied by theirs."""
        for name, (experts, scales) in self._found.items():
            device = experts.weights[0].device
            if experts.fp8 is None:
                scales = scales.to_empty(device="cpu")
            gate_up, down = self._read(name, experts)
            for slot, expert in enumerate(experts.part.own):
                own = [gate_up[expert], down[expert]]
                for target, whole in zip((scales.gate_up, scales.down), own, strict=True):
                    target[slot].copy_(self._part(whole, experts, scales, target is scales.gate_up))
                if experts.fp8 is None:
                    for weights, spread in zip(experts.weights, scales.spread(slot), strict=True):
                        rows, columns = weights[slot].shape
                        weights[slot].mul_(spread[:rows, :columns].to(device))

    def _part(self, whole: torch.Tensor, experts: Experts, scales: ExpertScales, gated: bool) -> torch.Tensor:
        """Of an expert's scales for every output, or block of it, and block of inputs: this part's."""
        part = experts.part
        inner = torch.arange(part.first, part.first + part.size)
        stored, own = self._blocks(experts, int(not gated)), scales.gate_up_blocks if gated else scales.down_blocks
        every = torch.arange(experts.size)
        if not gated:
            outputs, inputs = every[:: own.outputs] // stored.outputs, inner[:: own.inputs] // stored.inputs
            return whole[outputs][:, inputs]
        inputs = every[:: own.inputs] // stored.inputs
        if experts.layout != "each":  # gates and ups are one tensor, with blocks that may have some of both
            outputs = torch.cat([half * part.inner + inner[:: own.outputs] for half in range(2)]) // stored.outputs
            return whole[outputs][:, inputs]
        return torch.cat([half[inner[:: own.outputs] // stored.outputs] for half in whole.chunk(2)])[:, inputs]

    def _read(self, name: str, experts: Experts) -> tuple[Mapping[int, torch.Tensor], Mapping[int, torch.Tensor]]:
        """Scales of gate_up and down of each expert that is here, float32 [outputs or blocks, blocks of inputs]."""
        leaves = {weight: self._scale_of(weight) for weight, _ in experts.stored_parameters(name)}
        read = {weight: torch.empty(stored.shape, dtype=stored.dtype) for weight, stored in leaves.items()}
        self._reader.read_into([(leaves[weight], scale) for weight, scale in read.items()])
        if experts.layout == "each":
            return (
                {
                    expert: torch.cat([self._two(read, name, expert, leaf, experts) for leaf in _GATED])
                    for expert in experts.part.own
                },
                {expert: self._two(read, name, expert, "down_proj", experts) for expert in experts.part.own},
            )
        found = []
        for which, leaf in enumerate(("gate_up_proj", "down_proj")):
            scale = read[f"{name}.{leaf}"].float()
            scale = scale.reshape(len(scale), *(scale.shape[1:] or (1, 1)))
            if experts.layout == "inputs_first":
                scale = scale.transpose(1, 2)
            outputs = (2 * experts.part.inner, experts.size)[which]
            if self._block is None and scale.shape[1] == 1:
                scale = scale.expand(-1, outputs, -1)
            found.append(dict(enumerate(scale)))
        return found[0], found[1]

    def _two(
        self, read: Mapping[str, torch.Tensor], name: str, expert: int, leaf: str, experts: Experts
    ) -> torch.Tensor:
        scale = read[f"{name}.{expert}.{leaf}.weight"].float()
        if self._block is not None:
            return scale
        outputs = experts.size if leaf == "down_proj" else experts.part.inner
        return scale.reshape(-1, 1).expand(outputs, 1)
