"""Checkpoints whose weights are quantised: AWQ, GPTQ and compressed-tensors' packed whole numbers (8-bit floats are in
`checkpoint.fp8`).

Such a weight [N, K] is stored as several tensors. Numbers and zeros lie in 32-bit words, the lowest bits first:

- AWQ ("gemm"): qweight [K, N/8] and qzeros [groups, N/8], a word's columns in the order 0 2 4 6 1 3 5 7; scales
  [groups, N].
- GPTQ: qweight [K/8, N]; qzeros [groups, N/8], less 1 but in its second version; scales [groups, N].
- compressed-tensors: weight_packed [N, K/8]; weight_zero_point [N/8, groups], unless all are in the middle;
  weight_scale [N, groups].

Numbers of 8 bits have 4 in place of 8. GPTQ's g_idx [K] says which group an input belongs to, if these are not in
order.

Experts are stored one by one in the same form (`experts.0.gate_proj.qweight`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TypeAlias

import torch
from torch import nn

from vlmserve_common.checkpoint.fp8 import Fp8Scheme, Fp8Tensors
from vlmserve_common.checkpoint.reader import CheckpointReader, StoredTensor
from vlmserve_common.checkpoint.schemes import INPUTS, OUTPUTS, Scheme
from vlmserve_common.checkpoint.weights import WeightPiece, WeightRules, linears_of
from vlmserve_common.compute.experts import Experts
from vlmserve_common.compute.int_weights import ExpertInts, IntForm, IntWeights
from vlmserve_common.compute.linear import Linear
from vlmserve_common.compute.shard import Box
from vlmserve_common.errors import CheckpointError
from vlmserve_common.kernels.quantized import QuantizedWeight, merged

log = logging.getLogger(__name__)

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where in its word a column is
_Parts = Mapping[str, torch.Tensor]


class PlainTensors:
    """No weight is quantised; see `QuantizedTensors`."""

    weights: AbstractSet[str] = frozenset()
    stored: AbstractSet[str] = frozenset()
    eight_bit: AbstractSet[str] = frozenset()

    def load(self) -> None:
        """Nothing."""


def quantized_tensors(
    module: nn.Module,
    reader: CheckpointReader,
    rules: WeightRules,
    scheme: Scheme | Fp8Scheme | None,
    *,
    device: torch.device,
    keep_fp8: bool | None = None,
) -> PlainTensors | QuantizedTensors | Fp8Tensors:
    """A checkpoint's quantised weights; `module` is on the meta device until `load`. keep_fp8: see `Fp8Tensors`."""
    if scheme is None:
        return PlainTensors()
    if isinstance(scheme, Fp8Scheme):
        return Fp8Tensors(module, reader, rules, scheme, device=device, keep=keep_fp8)
    return QuantizedTensors(module, reader, rules, scheme, device)


class QuantizedTensors:
    """A checkpoint's quantised weights, as far as they belong to the `Linear`s and `Experts` of a module, which is
    still on the meta device.

    Layers that keep their few bits on `device` get parameters for these now (see `compute.int_weights`). weights: our
    names of the plain weights that quantised ones stand for, and of those parameters. stored: the names of their
    tensors. eight_bit: our names of weights that may be 8-bit floats. Raises CheckpointError for missing and misshaped
    ones.
    """

    eight_bit: AbstractSet[str] = frozenset()

    def __init__(
        self, module: nn.Module, reader: CheckpointReader, rules: WeightRules, scheme: Scheme, device: torch.device
    ) -> None:
        self._module, self._reader, self._scheme, self._device = module, reader, scheme, device
        by_name: dict[str, dict[str, StoredTensor]] = {}
        for name, stored in reader.tensors.items():
            prefix, _, leaf = rules.our_name(name).rpartition(".")
            if leaf in (*scheme.needed, *scheme.others):
                by_name.setdefault(prefix, {})[leaf] = stored
        self._shuffled = scheme.shuffled or any("weight_g_idx" in tensors for tensors in by_name.values())
        self._tensors: dict[str, dict[str, StoredTensor]] = {}
        self.weights: set[str] = set()
        self.stored: set[str] = set()
        self._linears: list[tuple[Linear, list[WeightPiece]]] = []
        self._experts: list[tuple[Experts, _PiecesOfSlots]] = []
        self._count = 0
        for name, layer, pieces in linears_of(module):
            if self._find(by_name, pieces):
                self._count += 1
                self._hold_linear(name, layer, pieces)
        for name, child in module.named_modules():
            if isinstance(child, Experts):
                slots = _pieces_of_slots(name, child)
                every = [piece for both in slots for pieces in both for piece in pieces]
                found = self._find(by_name, every)
                if found and found < len(every):
                    raise CheckpointError(
                        f"{reader.folder}: {found} of {len(every)} weights of {name} are quantised; all must be"
                    )
                if found:
                    self._count += 1
                    self._hold_experts(name, child, slots)

    def _find(self, by_name: Mapping[str, dict[str, StoredTensor]], pieces: Iterable[WeightPiece]) -> int:
        """Find the tensors of pieces of weights, and return how many pieces have some."""
        count = 0
        for piece in pieces:
            tensors = by_name.get(piece.name.removesuffix(".weight"))
            if tensors:
                self._check(piece.name, piece.whole_shape, tensors)
                self._tensors[piece.name] = tensors
                self.weights.add(piece.name)
                self.stored |= {stored.name for stored in tensors.values()}
                count += 1
        return count

    def _hold_linear(self, name: str, layer: Linear, pieces: list[WeightPiece]) -> None:
        assert layer.weight is not None
        everything = sum(len(piece.view) for piece in pieces if piece.name in self._tensors) == len(layer.weight)
        form = self._form(pieces)
        if everything and not self._shuffled and form.way(self._device):
            with torch.device("meta"):
                layer.hold_ints(IntWeights(form))
            self._linears.append((layer, pieces))
            self._add_parameters(name, layer.ints)

    def _hold_experts(self, name: str, experts: Experts, slots: _PiecesOfSlots) -> None:
        forms = [self._form(pieces[0]) for pieces in slots]
        ways = {form.way(self._device) for form in forms}
        if len(ways) == 1 and None not in ways and not self._shuffled:
            with torch.device("meta"):
                experts.hold_ints(ExpertInts(*(IntWeights(form, len(experts.part.own)) for form in forms)))
            self._experts.append((experts, slots))
            self._add_parameters(name, experts.ints)

    def _add_parameters(self, name: str, ints: nn.Module | None) -> None:
        assert ints is not None
        self.weights |= {f"{name}.ints.{leaf}" for leaf, _ in ints.named_parameters()}

    def _form(self, pieces: Sequence[WeightPiece]) -> IntForm:
        outer, inner = sum(len(piece.view) for piece in pieces), pieces[0].view.shape[1]
        group = math.gcd(self._scheme.group or pieces[0].whole_shape[1], pieces[0].place(INPUTS)[0])
        return IntForm(outer=outer, inner=inner, bits=self._scheme.bits, group=group, dtype=pieces[0].view.dtype)

    def _check(self, name: str, whole_shape: tuple[int, ...], tensors: Mapping[str, StoredTensor]) -> None:
        outer, inner = whole_shape
        shapes = self._scheme.shapes(outer, inner)
        for leaf in self._scheme.needed:
            if leaf not in tensors:
                prefix = name.removesuffix("weight")
                raise CheckpointError(
                    f"{self._reader.folder}: {prefix}{leaf} is missing; {', '.join(sorted(tensors))} are there"
                )
        for leaf, stored in tensors.items():
            whole = leaf not in ("scales", "weight_scale")
            if stored.shape != shapes[leaf] or whole == stored.dtype.is_floating_point:
                raise CheckpointError(
                    f"{self._reader.folder}: {stored.name} is {list(stored.shape)} of {stored.dtype}, not "
                    f"{list(shapes[leaf])} of {'whole' if whole else 'floating-point'} numbers ({self._scheme.method}, "
                    f"{self._scheme.bits} bits, group_size {self._scheme.group or -1})"
                )

    def load(self) -> None:
        """Give each layer its weight, one at a time: in its few bits, or else as numbers of the layer's dtype, which
        the log says. A weight of which only parts are quantised is one of the latter. CheckpointError for inputs that
        belong to groups in no order, if config.json does not say so."""
        for layer, pieces in self._linears:
            assert layer.ints is not None
            (weight,) = self._kept([pieces])
            if layer.ints.form.way(self._device) == "operators":
                layer.take(weight)
            else:
                layer.ints.fill(0, weight)
        for experts, slots in self._experts:
            self._load_experts(experts, slots)
        plain = self._load_plain()
        if plain:
            log.warning(
                "%d of %d quantised weights are dequantised, and take as much memory and time as others: quantised "
                "ones need our own operators on a CPU (--cpu-kernels) or Triton on a GPU (--gpu-kernels), groups in "
                "order, and sizes that these know",
                plain,
                self._count,
            )

    def _load_experts(self, experts: Experts, slots: _PiecesOfSlots) -> None:
        assert experts.ints is not None
        both, kept = (experts.ints.gate_up, experts.ints.down), [self._kept(pieces) for pieces in slots]
        if both[1].form.way(self._device) == "operators":
            experts.take(*kept)
            return
        for ints, weights in zip(both, kept, strict=True):
            for slot, weight in enumerate(weights):
                ints.fill(slot, weight)

    def _load_plain(self) -> int:
        """Dequantise the weights that are not kept, and return how many layers have some."""
        linears = [pieces for _, _, pieces in linears_of(self._module)]
        each = [
            [piece for both in _pieces_of_slots(name, child) for pieces in both for piece in pieces]
            for name, child in self._module.named_modules()
            if isinstance(child, Experts) and child.gate_up_proj is not None
        ]
        count = 0
        for pieces in [*linears, *each]:
            own = [piece for piece in pieces if piece.name in self._tensors]
            if not own:
                continue
            count += 1
            for piece, (part,) in zip(own, self._read([[piece] for piece in own], torch.device("cpu")), strict=True):
                piece.view.copy_(part.dequantize() if isinstance(part, QuantizedWeight) else part)
        return count

    def _kept(self, slots: Sequence[Sequence[WeightPiece]]) -> Iterator[QuantizedWeight]:
        """Yield the weight of each slot, whose pieces lie one below the other."""
        for pieces, parts in zip(slots, self._read(slots, self._device), strict=True):
            whole = [part for part in parts if isinstance(part, QuantizedWeight)]
            if len(whole) < len(parts):
                raise CheckpointError(
                    f"{self._reader.folder}: g_idx of {pieces[0].name.removesuffix('.weight')} puts inputs in groups "
                    "out of order, which desc_act in the quantization_config of config.json must say"
                )
            yield merged(whole)

    def _read(
        self, slots: Sequence[Sequence[WeightPiece]], device: torch.device
    ) -> Iterator[list[QuantizedWeight | torch.Tensor]]:
        """Read the pieces of all slots to a device at once, and yield those of each slot."""
        targets: list[tuple[StoredTensor, torch.Tensor]] = []
        read: list[list[dict[str, torch.Tensor]]] = []
        for pieces in slots:
            read.append([])
            for piece in pieces:
                own = {leaf: self._scheme.cut(leaf, one, piece) for leaf, one in self._tensors[piece.name].items()}
                parts = {leaf: torch.empty(one.shape, dtype=one.dtype, device=device) for leaf, one in own.items()}
                targets += [(own[leaf], parts[leaf]) for leaf in own]
                read[-1].append(parts)
        self._reader.read_into(targets)
        for pieces, every in zip(slots, read, strict=True):
            yield [unpack(self._scheme, parts, piece) for piece, parts in zip(pieces, every, strict=True)]


_PiecesOfSlots: TypeAlias = "tuple[list[list[WeightPiece]], list[list[WeightPiece]]]"


def _pieces_of_slots(name: str, experts: Experts) -> _PiecesOfSlots:
    """Return the pieces of gate_up and of down of each slot, if every expert has names of its own; otherwise none."""
    if experts.layout != "each":
        return [], []
    cuts = dict(experts.stored_cuts(name))
    every = []
    for stored, view in experts.stored_parameters(name):
        cut = cuts.get(stored)
        assert not isinstance(cut, Box)
        every.append(WeightPiece(name=stored, view=view, cut=cut))
    gated = 2 * len(experts.part.own)
    return [every[first : first + 2] for first in range(0, gated, 2)], [[piece] for piece in every[gated:]]


def unpack(scheme: Scheme, parts: _Parts, piece: WeightPiece) -> QuantizedWeight | torch.Tensor:
    """Make a piece of a weight of its tensors, by their last names. Returns float32 if its groups are not in order."""
    numbers, zeros, scales = _UNPACK[scheme.method](scheme, parts)
    outer, inner = piece.view.shape
    (first, _), (first_input, end_input) = piece.place(OUTPUTS), piece.place(INPUTS)
    per_word = 32 // scheme.bits
    # a word may begin with numbers in front of the first one of the piece
    numbers = _range(_range(numbers, 0, first % per_word, outer), 1, first_input % per_word, inner)
    zeros = _range(zeros, 0, first % per_word, outer)
    group = scheme.group or piece.whole_shape[1]
    of_input = torch.arange(first_input, end_input) // group
    order = parts.get("g_idx", parts.get("weight_g_idx"))
    if order is not None and not torch.equal(order.long().cpu(), of_input):
        of_input = order.long()
        return (numbers.float() - zeros.float()[:, of_input]) * scales.float()[:, of_input]
    # a first input inside a group makes groups smaller
    step = math.gcd(group, first_input)
    of_group = torch.arange(first_input, end_input, step) // group
    return QuantizedWeight(
        numbers=numbers.contiguous(),
        scales=scales.half()[:, of_group].contiguous(),
        zeros=zeros.short()[:, of_group].contiguous(),
        bits=scheme.bits,
        group=step,
    )


def _range(x: torch.Tensor, dim: int, before: int, size: int) -> torch.Tensor:
    """Select `size` entries: behind `before` entries if whole words were read, otherwise from the first one on."""
    return x.narrow(dim, before if x.shape[dim] > size else 0, size)


def _bits(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [..., n] -> uint8 [..., n * 32 / bits], the lowest bits of each first."""
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), dim=-1).flatten(-2)


def _unpack_awq(scheme: Scheme, parts: _Parts) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    def columns(words: torch.Tensor) -> torch.Tensor:
        turned = words.t().contiguous()
        numbers = turned.new_empty((len(turned), 8, turned.shape[1]), dtype=torch.uint8)
        for column, place in enumerate(_AWQ_PLACES):
            numbers[:, column] = (turned >> (4 * place)) & 15
        return numbers.flatten(0, 1)

    return columns(parts["qweight"]), columns(parts["qzeros"]), parts["scales"].t()


def _unpack_gptq(scheme: Scheme, parts: _Parts) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    zeros = _bits(parts["qzeros"], scheme.bits).short() + int(scheme.less_one)
    return _bits(parts["qweight"].t(), scheme.bits), zeros.t(), parts["scales"].t()


def _unpack_compressed(scheme: Scheme, parts: _Parts) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scales = parts["weight_scale"]
    if "weight_zero_point" in parts:
        zeros = _bits(parts["weight_zero_point"].t(), scheme.bits).t()
    else:
        zeros = scales.new_full(scales.shape, 2 ** (scheme.bits - 1), dtype=torch.int16)
    return _bits(parts["weight_packed"], scheme.bits), zeros, scales


_UNPACK: Mapping[str, Callable[[Scheme, _Parts], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {
    "awq": _unpack_awq,
    "gptq": _unpack_gptq,
    "compressed-tensors": _unpack_compressed,
}
