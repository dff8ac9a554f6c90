"""How config.json says that weights are quantised: to whole numbers (`checkpoint.gptq_awq`) or to 8-bit floats
(`checkpoint.fp8`)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vlmserve_common.checkpoint.fields import Fields
from vlmserve_common.checkpoint.fp8 import Fp8Scheme, compressed_fp8_scheme, fp8_scheme
from vlmserve_common.checkpoint.hf_config import text_fields
from vlmserve_common.checkpoint.reader import StoredTensor
from vlmserve_common.checkpoint.weights import WeightPiece
from vlmserve_common.compute.shard import Cut
from vlmserve_common.errors import CheckpointError

OUTPUTS, INPUTS = 0, 1  # dimensions of a weight


@dataclass(frozen=True, kw_only=True)
class _Axis:
    """What a dimension of a tensor goes over: those of a weight, or its groups of inputs. packed: several to a word."""

    of: int | Literal["groups"]
    packed: bool = False


_OUT, _IN, _GROUPS = _Axis(of=OUTPUTS), _Axis(of=INPUTS), _Axis(of="groups")
_OUT_WORDS, _IN_WORDS = _Axis(of=OUTPUTS, packed=True), _Axis(of=INPUTS, packed=True)
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
    """How a checkpoint is quantised. group: inputs of a scale, 0 for all. less_one: zeros are stored so. shuffled:
    inputs belong to groups in no order. plain: patterns of the names of modules that are said to stay plain; what is
    loaded follows from the tensors alone."""

    method: str
    bits: int
    group: int
    less_one: bool = False
    shuffled: bool = False
    plain: tuple[str, ...] = ()

    def is_plain(self, name: str) -> bool:
        """Whether a module of the decoder, given its name from `layers.` on, is said to stay plain."""
        published = (f"model.language_model.{name}", f"model.{name}")
        return any(re.search(pattern, one) for pattern in self.plain for one in published)

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
        sizes = {OUTPUTS: outer, INPUTS: inner, "groups": math.ceil(inner / (self.group or inner))}
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
        bits, group = fields.integer("bits"), _group(fields)
        return _checked(fields, Scheme(method=method, bits=bits, group=group, plain=_plain(fields)), (4,))
    if method == "gptq":
        form = fields.string("checkpoint_format", "gptq")
        fields.allow("checkpoint_format", form, ("gptq", "gptq_v2"))
        group = _group(fields)
        scheme = Scheme(
            method=method,
            bits=fields.integer("bits"),
            group=group,
            less_one=form == "gptq",
            shuffled=bool(group) and fields.flag("desc_act", False),
            plain=_plain(fields),
        )
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
        bits, group = weights.integer("num_bits"), _group(weights)
        scheme = Scheme(method=method, bits=bits, group=group, plain=_plain(fields))
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


def _plain(fields: Fields) -> tuple[str, ...]:
    """Return patterns of modules that are said to stay plain, by AWQ (modules_to_not_convert), compressed-tensors
    (ignore) and GPTQModel (dynamic): patterns behind "re:" or "-:", or names, whole or some parts of these."""
    names = [name for key in ("modules_to_not_convert", "ignore", "dynamic") for name in fields.values.get(key) or ()]
    return tuple(
        name[3:] if name.startswith("re:") else name[2:] if name.startswith("-:") else rf"\b{re.escape(name)}(\.|$)"
        for name in names
        if isinstance(name, str) and not name.startswith("+:")
    )


def _checked(fields: Fields, scheme: Scheme, bits: tuple[int, ...]) -> Scheme:
    fields.allow("bits", scheme.bits, bits)
    return scheme
