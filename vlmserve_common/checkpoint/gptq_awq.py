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
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from vlmserve_common.checkpoint.fields import Fields
from vlmserve_common.checkpoint.fp8 import Fp8Scheme, Fp8Tensors, compressed_fp8_scheme, fp8_scheme
from vlmserve_common.checkpoint.hf_config import text_fields
from vlmserve_common.checkpoint.reader import CheckpointReader, StoredTensor
from vlmserve_common.checkpoint.weights import WeightPiece, WeightRules, linears_of
from vlmserve_common.compute.shard import Cut
from vlmserve_common.errors import CheckpointError
from vlmserve_common.kernels.quantized import QuantizedWeight, can_pack_quantized, merged

log = logging.getLogger(__name__)

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where in its word a column is
_Parts = Mapping[str, torch.Tensor]
_OUTPUTS, _INPUTS = 0, 1  # dimensions of a weight


@dataclass(frozen=True, kw_only=True)
class _Axis:
    """What a dimension of a tensor goes over: those of a weight, or its groups of inputs. packed: several to a word."""

    of: int | Literal["groups"]
    packed: bool = False


_OUT, _IN, _GROUPS = _Axis(of=_OUTPUTS), _Axis(of=_INPUTS), _Axis(of="groups")
_OUT_WORDS, _IN_WORDS = _Axis(of=_OUTPUTS, packed=True), _Axis(of=_INPUTS, packed=True)
_AXES: Mapping[str, Mapping[str, tuple[_Axis, ...]]] = {
    "awq": {
        "qweight": (_IN, _OUT_WORDS),
        "qzeros": (_GROUPS, _OUT_WORDS),
        "scales": (_GROUPS, _OUT),
        "g_idx": (_IN,),
    },
    "gptq": {
        "qweight": (_IN_WORDS, _OUT),
        "qzeros": (_GROUPS, _OUT_WORDS),
        "scales": (_GROUPS, _OUT),
        "g_idx": (_IN,),
    },
    "compressed-tensors": {
        "weight_packed": (_OUT, _IN_WORDS),
        "weight_scale": (_OUT, _GROUPS),
        "weight_zero_point": (_OUT_WORDS, _GROUPS),
        "weight_g_idx": (_IN,),
    },
}


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How a checkpoint is quantised. group: inputs of a scale, 0 for all. less_one: zeros are stored so."""

    method: str
    bits: int
    group: int
    less_one: bool = False

    @property
    def needed(self) -> tuple[str, ...]:
        """Tensors of each weight: numbers, scales, and zeros if there must be any."""
        if self.method == "compressed-tensors":
            return ("weight_packed", "weight_scale")
        return ("qweight", "scales", "qzeros")

    @property
    def others(self) -> tuple[str, ...]:
        """Tensors that a weight may have."""
        if self.method == "compressed-tensors":
            return ("weight_zero_point", "weight_g_idx", "weight_shape")
        return ("g_idx",)

    def shapes(self, outer: int, inner: int) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the tensors of a weight [outer, inner]."""
        sizes = {_OUTPUTS: outer, _INPUTS: inner, "groups": math.ceil(inner / (self.group or inner))}
        shapes = {
            leaf: tuple(math.ceil(sizes[axis.of] / self._per_word(axis)) for axis in axes)
            for leaf, axes in _AXES[self.method].items()
        }
        return shapes | {"weight_shape": (2,)}

    def cut(self, leaf: str, stored: StoredTensor, piece: WeightPiece) -> StoredTensor:
        """Cut a weight's tensor to what a piece of the weight needs: whole words, and the scales of all groups."""
        for dim, axis in enumerate(_AXES[self.method].get(leaf, ())):
            if piece.cut is not None and axis.of == piece.cut.dim:
                first, end = piece.place(piece.cut.dim)
                per = self._per_word(axis)
                count = math.ceil(end / per) - first // per
                return stored.cut(Cut(dim, first // per, count, stored.shape[dim]))
        return stored

    def _per_word(self, axis: _Axis) -> int:
        return 32 // self.bits if axis.packed else 1


def read_scheme(hf_config: Mapping[str, Any]) -> Scheme | Fp8Scheme | None:
    """How config.json says that weights are quantised; None if they are not. CheckpointError for other ways."""
    top = Fields(hf_config, "config.json")
    for fields in (top, text_fields(top)):
        if fields.has("quantization_config"):
            return _scheme(fields.section("quantization_config"))
    return None


def _scheme(fields: Fields) -> Scheme | Fp8Scheme:
    method = fields.string("quant_method")
    if method == "fp8":
        return fp8_scheme(fields)
    if method == "awq":
        fields.allow("version", fields.string("version", "gemm").lower(), ("gemm",))
        fields.allow("zero_point", fields.flag("zero_point", True), (True,))
        return _checked(fields, Scheme(method=method, bits=fields.integer("bits"), group=_group(fields)), (4,))
    if method == "gptq":
        form = fields.string("checkpoint_format", "gptq")
        fields.allow("checkpoint_format", form, ("gptq", "gptq_v2"))
        scheme = Scheme(method=method, bits=fields.integer("bits"), group=_group(fields), less_one=form == "gptq")
        return _checked(fields, scheme, (4, 8))
    if method == "compressed-tensors":
        form = fields.string("format")
        fields.allow("format", form, ("pack-quantized", "float-quantized"))
        groups = fields.section("config_groups")
        if len(groups.values) != 1:
            raise CheckpointError(f"{groups.where} has {len(groups.values)} entries; one is supported")
        own = groups.section(next(iter(groups.values)))
        if form == "float-quantized":
            return compressed_fp8_scheme(own)
        if own.has("input_activations"):
            raise CheckpointError(f"{own.where}: input_activations are quantised; only weights are supported")
        weights = own.section("weights")
        weights.allow("type", weights.string("type", "int"), ("int",))
        scheme = Scheme(method=method, bits=weights.integer("num_bits"), group=_group(weights))
        return _checked(weights, scheme, (4, 8))
    raise CheckpointError(
        f"{fields.where}: quant_method {method!r} is not supported; supported are awq, gptq, fp8 and "
        "compressed-tensors (pack-quantized, float-quantized)"
    )


def _group(fields: Fields) -> int:
    group = fields.integer("group_size", -1)
    if group != -1 and (group <= 0 or group % 8):
        raise CheckpointError(f"{fields.where}: group_size is {group}; it must be -1, or a multiple of 8")
    return max(0, group)


def _checked(fields: Fields, scheme: Scheme, bits: tuple[int, ...]) -> Scheme:
    fields.allow("bits", scheme.bits, bits)
    return scheme


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
    return QuantizedTensors(module, reader, rules, scheme)


class QuantizedTensors:
    """A checkpoint's quantised weights, as far as they belong to the `Linear`s of a module.

    weights: our names of the plain weights that they stand for. stored: the names of their tensors. eight_bit: our
    names of weights that may be 8-bit floats. Raises CheckpointError for missing and misshaped ones.
    """

    eight_bit: AbstractSet[str] = frozenset()

    def __init__(self, module: nn.Module, reader: CheckpointReader, rules: WeightRules, scheme: Scheme) -> None:
        self._module, self._reader, self._scheme = module, reader, scheme
        by_name: dict[str, dict[str, StoredTensor]] = {}
        for name, stored in reader.tensors.items():
            prefix, _, leaf = rules.our_name(name).rpartition(".")
            if leaf in (*scheme.needed, *scheme.others):
                by_name.setdefault(prefix, {})[leaf] = stored
        self._tensors: dict[str, dict[str, StoredTensor]] = {}
        self.weights: set[str] = set()
        self.stored: set[str] = set()
        for _, _, pieces in linears_of(module):
            for piece in pieces:
                tensors = by_name.get(piece.name.removesuffix(".weight"))
                if tensors:
                    self._check(piece.name, piece.whole_shape, tensors)
                    self._tensors[piece.name] = tensors
                    self.weights.add(piece.name)
                    self.stored |= {stored.name for stored in tensors.values()}

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
        """Give each layer its weight, one at a time: packed where this process has the operators, else as numbers of
        the layer's dtype, which the log says. A weight of which only parts are quantised is one of the latter."""
        plain = count = 0
        for _, layer, pieces in linears_of(self._module):
            parts = [self._read(piece) if piece.name in self._tensors else None for piece in pieces]
            if all(part is None for part in parts):
                continue
            count += 1
            whole = [part for part in parts if isinstance(part, QuantizedWeight)]
            assert layer.weight is not None
            on_cpu = layer.weight.is_cpu and layer.dtype != torch.float16
            everything = len(whole) == len(parts) and sum(len(part.numbers) for part in whole) == len(layer.weight)
            if on_cpu and everything and can_pack_quantized(whole[0]):
                layer.take(merged(whole))
                continue
            plain += 1
            for piece, part in zip(pieces, parts, strict=True):
                if part is not None:
                    piece.view.copy_(part.dequantize() if isinstance(part, QuantizedWeight) else part)
        if plain:
            log.warning(
                "%d of %d quantised weights are dequantised, and take as much memory and time as others: quantised "
                "ones need our own operators on a CPU (--cpu-kernels), bfloat16 or float32, and groups in order",
                plain,
                count,
            )

    def _read(self, piece: WeightPiece) -> QuantizedWeight | torch.Tensor:
        tensors = {leaf: self._scheme.cut(leaf, stored, piece) for leaf, stored in self._tensors[piece.name].items()}
        parts = {leaf: torch.empty(stored.shape, dtype=stored.dtype) for leaf, stored in tensors.items()}
        self._reader.read_into((stored, parts[leaf]) for leaf, stored in tensors.items())
        return unpack(self._scheme, parts, piece)


def unpack(scheme: Scheme, parts: _Parts, piece: WeightPiece) -> QuantizedWeight | torch.Tensor:
    """Make a piece of a weight of its tensors, by their last names. Returns float32 if its groups are not in order."""
    numbers, zeros, scales = _UNPACK[scheme.method](scheme, parts)
    outer, inner = piece.view.shape
    (first, _), (first_input, end_input) = piece.place(_OUTPUTS), piece.place(_INPUTS)
    per_word = 32 // scheme.bits
    # a word may begin with numbers in front of the first one of the piece
    numbers = _range(_range(numbers, 0, first % per_word, outer), 1, first_input % per_word, inner)
    zeros = _range(zeros, 0, first % per_word, outer)
    group = scheme.group or piece.whole_shape[1]
    of_input = torch.arange(first_input, end_input) // group
    order = parts.get("g_idx", parts.get("weight_g_idx"))
    if order is not None and not torch.equal(order.long(), of_input):
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
        return _bits(words, 4).view(len(words), -1, 8)[..., list(_AWQ_PLACES)].flatten(1).t()

    return columns(parts["qweight"]), columns(parts["qzeros"]), parts["scales"].t()


def _unpack_gptq(scheme: Scheme, parts: _Parts) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    zeros = _bits(parts["qzeros"], scheme.bits).short() + int(scheme.less_one)
    return _bits(parts["qweight"].t(), scheme.bits), zeros.t(), parts["scales"].t()


def _unpack_compressed(scheme: Scheme, parts: _Parts) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    scales = parts["weight_scale"]
    if "weight_zero_point" in parts:
        zeros = _bits(parts["weight_zero_point"].t(), scheme.bits).t()
    else:
        zeros = torch.full(scales.shape, 2 ** (scheme.bits - 1), dtype=torch.int16)
    return _bits(parts["weight_packed"], scheme.bits), zeros, scales


_UNPACK: Mapping[str, Callable[[Scheme, _Parts], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {
    "awq": _unpack_awq,
    "gptq": _unpack_gptq,
    "compressed-tensors": _unpack_compressed,
}
