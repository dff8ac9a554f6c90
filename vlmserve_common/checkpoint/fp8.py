"""Checkpoints whose weights are 8-bit floats (e4m3), with a scale for each block, output or tensor.

Such a weight [N, K] is stored as `weight`, of that type, and

- `weight_scale_inv` or `weight_scale`, the factor of the numbers: [ceil(N / 128), ceil(K / 128)] for blocks, [N, 1] for
  outputs, [] or [1] for the whole;
- `input_scale` or `activation_scale`, [] or [1], if inputs are divided by a number that was found with data.

Experts are stored one by one in the same form (`experts.0.gate_proj.weight`), or all in one tensor:
`experts.gate_up_proj` and `experts.down_proj`, beside which `..._scale_inv` or `..._scale` [experts, *blocks] has the
same order of dimensions.

`fp8` (transformers' FineGrainedFP8, vLLM's) and compressed-tensors' `float-quantized` have this form.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from vlmserve_common.checkpoint.fields import Fields
from vlmserve_common.checkpoint.reader import CheckpointReader, StoredTensor
from vlmserve_common.checkpoint.weights import WeightPiece, WeightRules, linears_of
from vlmserve_common.compute.experts import Experts
from vlmserve_common.compute.fp8 import FP8, Blocks, ExpertScales, Fp8Scales, Inputs, can_multiply, dequantize_
from vlmserve_common.compute.linear import Linear
from vlmserve_common.errors import CheckpointError

log = logging.getLogger(__name__)

_WEIGHT_SCALES = ("weight_scale_inv", "weight_scale")
_INPUT_SCALES = ("input_scale", "activation_scale")


@dataclass(frozen=True, kw_only=True)
class Fp8Scheme:
    """How weights and inputs are rounded.

    block: rows and columns that share a scale; None: each output or the whole tensor has one. inputs: how inputs are
    rounded; None: not at all.
    """

    block: tuple[int, int] | None
    inputs: Inputs | None


def fp8_scheme(fields: Fields) -> Fp8Scheme:
    """Read the scheme of a quantization_config with quant_method "fp8". CheckpointError if it is not supported."""
    fields.allow("fmt", fields.string("fmt", "e4m3"), ("e4m3", "float8_e4m3fn"))
    activations = fields.string("activation_scheme", "dynamic")
    fields.allow("activation_scheme", activations, ("dynamic", "static"))
    block = _block(fields, "weight_block_size")
    return Fp8Scheme(block=block, inputs="static" if activations == "static" else "group" if block else "token")


def compressed_fp8_scheme(group: Fields) -> Fp8Scheme:
    """Read the scheme of one of compressed-tensors' config_groups of floats. CheckpointError if it is not supported."""
    weights = group.section("weights")
    weights.allow("type", weights.string("type"), ("float",))
    weights.allow("num_bits", weights.integer("num_bits"), (8,))
    strategy = weights.string("strategy", "tensor")
    weights.allow("strategy", strategy, ("tensor", "channel", "block"))
    block = _block(weights, "block_structure") if strategy == "block" else None
    if strategy == "block" and block is None:
        raise CheckpointError(f"{weights.where}: block_structure is missing")
    if not group.has("input_activations"):
        return Fp8Scheme(block=block, inputs=None)
    inputs = group.section("input_activations")
    inputs.allow("type", inputs.string("type"), ("float",))
    inputs.allow("num_bits", inputs.integer("num_bits"), (8,))
    if not inputs.flag("dynamic", False):
        return Fp8Scheme(block=block, inputs="static")
    return Fp8Scheme(block=block, inputs="group" if block else "token")


def _block(fields: Fields, name: str) -> tuple[int, int] | None:
    sizes = fields.integers(name, ())
    if sizes and (len(sizes) != 2 or min(sizes) <= 0):
        raise CheckpointError(f"{fields.where}: {name} is {list(sizes)}; it must be two sizes above 0")
    return (sizes[0], sizes[1]) if sizes else None


@dataclass(frozen=True, kw_only=True)
class _Stored:
    weight: StoredTensor
    scale: StoredTensor
    input_scale: StoredTensor | None


class Fp8Tensors:
    """A checkpoint's 8-bit weights of the `Linear`s of a module, which is still on the meta device.

    Layers that keep 8-bit weights get their 8-bit parameters now. keep: whether they do; None: if the device multiplies
    them. See `QuantizedTensors` for the rest. Their numbers
    are loaded as other weights are (`eight_bit`), before `load`. Raises CheckpointError for scales that do not fit.
    """

    def __init__(
        self,
        module: nn.Module,
        reader: CheckpointReader,
        rules: WeightRules,
        scheme: Fp8Scheme,
        *,
        device: torch.device,
        keep: bool | None = None,
    ) -> None:
        self._module, self._reader, self._scheme, self._device, self._keep = module, reader, scheme, device, keep
        ours = {rules.our_name(name): stored for name, stored in reader.tensors.items()}
        self._tensors = _find(ours)
        self._experts = Fp8Experts(module, reader, ours, scheme.block, device=device, keep=keep)
        self.weights, self.stored = self._experts.weights, self._experts.stored
        self.eight_bit = self._experts.eight_bit
        self._kept: set[str] = set()
        self._count = 0
        for name, layer, pieces in linears_of(module):
            found = [self._tensors[piece.name] for piece in pieces if piece.name in self._tensors]
            if not found:
                continue
            self._count += 1
            for piece in pieces:
                if piece.name in self._tensors:
                    self._check(piece.whole_shape, self._tensors[piece.name])
                    self.eight_bit.add(piece.name)
            self.stored |= {tensor.name for own in found for tensor in (own.scale, own.input_scale) if tensor}
            if len(found) == len(pieces) and self._hold(layer, pieces, static=all(own.input_scale for own in found)):
                self._kept.add(name)
                self.weights |= {f"{name}.fp8.{leaf}" for leaf, _ in layer.fp8.named_parameters()}  # type: ignore[union-attr]

    def _check(self, whole_shape: tuple[int, ...], stored: _Stored) -> None:
        outer, inner = whole_shape
        if self._scheme.block is not None:
            rows, columns = self._scheme.block
            shapes: list[tuple[int, ...]] = [(math.ceil(outer / rows), math.ceil(inner / columns))]
        else:
            shapes = [(outer, 1), (outer,), (1, 1), (1,), ()]
        _check_shape(self._reader, stored.scale, shapes, self._scheme.block)
        if stored.input_scale is not None:
            _check_shape(self._reader, stored.input_scale, [(1,), (), (1, 1)], self._scheme.block)

    def _hold(self, layer: Linear, pieces: Sequence[WeightPiece], *, static: bool) -> bool:
        """Give a layer 8-bit parameters if it keeps its 8-bit weight. Returns whether it does."""
        assert layer.weight is not None
        inputs = self._scheme.inputs
        if inputs is None or (inputs == "static" and (not static or self._scheme.block)):
            return False
        outer, inner = layer.weight.shape
        rows, columns = self._blocks(pieces[0].place(1))
        starts, inside = [piece.place(0)[0] for piece in pieces], [len(piece.view) for piece in pieces[:-1]]
        if any(row % rows for row in (*starts, *inside)):
            rows = 1  # blocks that are cut, or not whole, cannot be joined: each row gets its block's scales
        keep = self._keep
        if keep is None:
            keep = can_multiply(self._device, (outer, inner), rows, columns, inputs, layer.dtype)
        if keep:
            with torch.device("meta"):
                layer.hold_fp8(Fp8Scales((outer, inner), rows, columns, inputs, layer.dtype))
        return keep

    def load(self) -> None:
        """Read the scales, and multiply weights that are not kept as they are by theirs, which the log says."""
        for name, layer, pieces in linears_of(self._module):
            if name in self._kept:
                self._fill(layer, pieces)
                continue
            for piece in pieces:
                if piece.name in self._tensors:
                    rows, columns = self._blocks(piece.place(1))
                    rows = 1 if piece.place(0)[0] % rows else rows
                    dequantize_(piece.view, self._scales(piece, rows).to(piece.view.device), rows, columns)
        self._experts.load()
        kept, count = len(self._kept) + self._experts.kept, self._count + self._experts.count
        if kept < count:
            log.warning(
                "%d of %d weights of 8-bit floats are dequantised, and take as much memory and time as others: they "
                "stay as they are on a GPU of compute capability 8.9 or later (see docs/gpu.md)",
                count - kept,
                count,
            )

    def _blocks(self, columns: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns that have a scale each, of a part of a weight: its first column may be inside a block, which
        makes blocks smaller."""
        if self._scheme.block is None:
            return 1, columns[1] - columns[0]
        return self._scheme.block[0], math.gcd(self._scheme.block[1], columns[0])

    def _scales(self, piece: WeightPiece, rows: int) -> torch.Tensor:
        """Return the scales of a piece's blocks. Its first row is a block's first; rows: of a block, or 1 for each
        row's."""
        scale = self._read(self._tensors[piece.name].scale)
        (first, end), columns = piece.place(0), piece.place(1)
        if self._scheme.block is None:
            return scale.expand(end - first, 1) if scale.numel() == 1 else scale[first:end]
        block_rows, block_columns = self._scheme.block
        if rows != block_rows:
            scale = scale[torch.arange(first, end) // block_rows]
        else:
            scale = scale[first // rows : -(-end // rows)]
        step = self._blocks(columns)[1]
        return scale.repeat_interleave(block_columns // step, 1)[:, columns[0] // step : -(-columns[1] // step)]

    def _fill(self, layer: Linear, pieces: Sequence[WeightPiece]) -> None:
        assert layer.fp8 is not None
        joined = torch.cat([self._scales(piece, layer.fp8.rows) for piece in pieces])
        layer.fp8.weights[: len(joined)].copy_(joined)  # a padded vocabulary has more rows
        if layer.fp8.input is not None:
            own = [self._tensors[piece.name].input_scale for piece in pieces]
            # parts have the same inputs, and so nearly always the same scale
            layer.fp8.input.copy_(torch.stack([self._read(stored).flatten() for stored in own if stored]).amax(0))

    def _read(self, stored: StoredTensor) -> torch.Tensor:
        scale = torch.empty(stored.shape, dtype=stored.dtype)
        self._reader.read_into([(stored, scale)])
        return scale.float().reshape(stored.shape if scale.ndim == 2 else (-1, 1))


def _find(ours: Mapping[str, StoredTensor]) -> dict[str, _Stored]:
    """Return all 8-bit weights that have a scale, by our names."""

    def beside(name: str, leaves: Sequence[str]) -> StoredTensor | None:
        prefix = name.removesuffix("weight")
        return next((ours[prefix + leaf] for leaf in leaves if prefix + leaf in ours), None)

    found = {}
    for name, stored in ours.items():
        scale = beside(name, _WEIGHT_SCALES) if name.endswith(".weight") and stored.dtype == FP8 else None
        if scale is not None:
            found[name] = _Stored(weight=stored, scale=scale, input_scale=beside(name, _INPUT_SCALES))
    return found


def _check_shape(
    reader: CheckpointReader, stored: StoredTensor, shapes: Sequence[tuple[int, ...]], block: tuple[int, int] | None
) -> None:
    if stored.shape not in shapes or not stored.dtype.is_floating_point:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise CheckpointError(
            f"{reader.folder}: {stored.name} is {list(stored.shape)} of {stored.dtype}, not {expected} of "
            f"floating-point numbers (blocks of {block})"
        )


_OTHERS = (".input_scale", ".activation_scale", "_activation_scale", "_input_scale")


class Fp8Experts:
    """The experts of 8-bit floats in a module on the meta device; see `Fp8Tensors`.

    block: rows and columns that share a scale; None: each output or the whole expert has one. kept: how many sparse
    MLPs keep 8-bit weights.
    """

    def __init__(
        self,
        module: nn.Module,
        reader: CheckpointReader,
        ours: Mapping[str, StoredTensor],
        block: tuple[int, int] | None,
        *,
        device: torch.device,
        keep: bool | None,
    ) -> None:
        self._reader, self._block, self._ours = reader, block, ours
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
        """How many sparse MLPs have 8-bit floats in the checkpoint."""
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
        """Return the blocks of gate_up (0) or down (1) in whole experts."""
        if self._block is None:
            return Blocks(outputs=1, inputs=(experts.size, experts.part.inner)[which])
        rows, columns = self._block
        if experts.layout == "inputs_first":
            rows, columns = columns, rows
        return Blocks(outputs=rows, inputs=columns)

    def _scale_of(self, weight: str) -> StoredTensor:
        names = [weight.removesuffix("weight") + leaf for leaf in _WEIGHT_SCALES] if weight.endswith(".weight") else []
        names += [f"{weight}_scale_inv", f"{weight}_scale"]
        found = next((self._ours[name] for name in names if name in self._ours), None)
        if found is None:
            raise CheckpointError(f"{self._reader.folder}: {names[0]} is missing; {weight} is of 8-bit floats")
        return found

    def _check(self, weight: str, experts: Experts) -> None:
        scale = self._scale_of(weight)
        *outer, rows, columns = self._ours[weight].shape
        if self._block is not None:
            allowed: list[tuple[int, ...]] = [(*outer, -(-rows // self._block[0]), -(-columns // self._block[1]))]
        elif experts.layout == "each":
            allowed = [(rows, 1), (rows,), (1, 1), (1,), ()]
        else:
            outputs = (1, columns) if experts.layout == "inputs_first" else (rows, 1)
            allowed = [(*outer, *outputs), (*outer, 1, 1), (*outer,)]
        _check_shape(self._reader, scale, allowed, self._block)

    def load(self) -> None:
        """Read the scales, and multiply the weights that do not stay in 8 bits by them."""
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
        """Select this process's part of an expert's scales [outputs or blocks of them, blocks of inputs]."""
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
        """Read the scales of gate_up and down of each expert here, float32 [outputs or blocks, blocks of inputs]."""
        leaves = {weight: self._scale_of(weight) for weight, _ in experts.stored_parameters(name)}
        read = {weight: torch.empty(stored.shape, dtype=stored.dtype) for weight, stored in leaves.items()}
        self._reader.read_into([(leaves[weight], scale) for weight, scale in read.items()])
        if experts.layout == "each":
            every = {
                (expert, leaf): self._of_one(read[f"{name}.{expert}.{leaf}.weight"].float(), leaf, experts)
                for expert in experts.part.own
                for leaf in ("gate_proj", "up_proj", "down_proj")
            }
            gated = {
                expert: torch.cat((every[expert, "gate_proj"], every[expert, "up_proj"])) for expert in experts.part.own
            }
            return gated, {expert: every[expert, "down_proj"] for expert in experts.part.own}
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

    def _of_one(self, scale: torch.Tensor, leaf: str, experts: Experts) -> torch.Tensor:
        if self._block is not None:
            return scale
        outputs = experts.size if leaf == "down_proj" else experts.part.inner
        return scale.reshape(-1, 1).expand(outputs, 1)
