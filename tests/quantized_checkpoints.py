"""Quantised checkpoints, made from plain ones by the definition of each format; and the same weights, dequantised."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

FORMATS = ("awq", "gptq", "gptq_v2", "gptq-8", "compressed-tensors")
_LINEARS = re.compile(r"layers\.\d+\.(self_attn\.[qkvo]|mlp\.(experts\.\d+\.)?(gate|up|down))_proj\.weight$")
_ELSEWHERE = re.compile(r"visual|audio_tower|mtp\.")
_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Quantized:
    """numbers and order [N, K], scales and zeros [N, groups]; order: each input's group."""

    numbers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    order: torch.Tensor

    def dequantized(self) -> torch.Tensor:
        """float32 [N, K]."""
        return self.scales.float()[:, self.order] * (self.numbers - self.zeros[:, self.order])


def make_quantized(
    plain: Path, folder: Path, form: str, *, group: int = 32, shuffled: bool = False, some: str = "", also: str = "$^"
) -> tuple[Path, Path]:
    """A checkpoint of one of FORMATS from a plain one, and a plain one with the same weights: folder/a, folder/b.

    Experts have a name each in folder/a, and lie in folder/b as in the plain one. shuffled: inputs belong to groups in
    no order. some: only weights whose names have this. also: a pattern of further weights.
    """
    made, same = folder / "a", folder / "b"
    shutil.copytree(plain, made)
    shutil.copytree(plain, same)
    whole = load_file(plain / "model.safetensors")
    inputs_first = any(name.endswith("experts.gate_up_proj") and _inputs_first(one) for name, one in whole.items())
    tensors = {own: one for name, value in whole.items() for own, one in _each(name, value, inputs_first).items()}
    stored: dict[str, torch.Tensor] = {}
    for name, weight in list(tensors.items()):
        taken = (_LINEARS.search(name) and some in name) or re.search(also, name)
        if not taken or _ELSEWHERE.search(name):
            stored[name] = weight
            continue
        quantized = _round(weight.float(), 8 if form == "gptq-8" else 4, group, shuffled=shuffled)
        tensors[name] = quantized.dequantized()
        prefix = name.removesuffix("weight")
        stored |= {prefix + leaf: value.contiguous() for leaf, value in _STORE[form](quantized).items()}
    save_file(stored, made / "model.safetensors", metadata={"format": "pt"})
    back = {name: _together(name, value, tensors, inputs_first) for name, value in whole.items()}
    save_file(back, same / "model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = json.loads((made / "config.json").read_text())
    config["quantization_config"] = _config(form, group, shuffled)
    (made / "config.json").write_text(json.dumps(config))
    return made, same


def _inputs_first(gate_up: torch.Tensor) -> bool:
    """Whether gate_up_proj is [experts, inputs, outputs]; the tiny models' inputs are 64."""
    assert gate_up.shape[1] != gate_up.shape[2]
    return gate_up.shape[1] == 64


def _each(name: str, value: torch.Tensor, inputs_first: bool) -> dict[str, torch.Tensor]:
    """Experts one by one."""
    found = _EXPERTS.fullmatch(name)
    if not found:
        return {name: value}
    parts = ("gate_proj", "up_proj") if found[2] == "gate_up_proj" else ("down_proj",)
    return {
        f"{found[1]}.{expert}.{part}.weight": piece.contiguous()
        for expert, weight in enumerate(value.transpose(1, 2) if inputs_first else value)
        for part, piece in zip(parts, weight.chunk(len(parts)), strict=True)
    }


def _together(name: str, value: torch.Tensor, tensors: dict[str, torch.Tensor], inputs_first: bool) -> torch.Tensor:
    """What `_each` took apart, of other weights."""
    if not _EXPERTS.fullmatch(name):
        return tensors[name]
    one_by_one = [tensors[own] for own in _each(name, value, inputs_first)]
    each = len(one_by_one) // len(value)
    joined = torch.stack([torch.cat(one_by_one[at : at + each]) for at in range(0, len(one_by_one), each)])
    return (joined.transpose(1, 2) if inputs_first else joined).contiguous()


def _round(weight: torch.Tensor, bits: int, group: int, *, shuffled: bool) -> Quantized:
    outer, inner = weight.shape
    order = torch.arange(inner) // group
    if shuffled:
        order = order[torch.randperm(inner, generator=torch.Generator().manual_seed(0))]
    groups = math.ceil(inner / group)
    low, high = torch.zeros(outer, groups), torch.zeros(outer, groups)
    for index in range(groups):
        own = weight[:, order == index]
        low[:, index], high[:, index] = own.amin(1).clamp(max=0), own.amax(1).clamp(min=0)
    most = 2**bits - 1
    scales = ((high - low) / most).clamp(min=1e-4).half()
    # a zero of 0 cannot be told from one of 2^bits where zeros are stored less 1
    zeros = (-low / scales.float()).round().clamp(1, most).int()
    numbers = ((weight / scales.float()[:, order]).round() + zeros[:, order]).clamp(0, most).int()
    return Quantized(numbers, scales, zeros, order)


def _packed(numbers: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """[..., n] -> int32 [..., n * bits / 32]; place i of a word has its number order[i]."""
    count = 32 // bits
    parts = numbers.long().unflatten(-1, (-1, count))
    words = torch.zeros(parts.shape[:-1], dtype=torch.int64)
    for place, source in enumerate(order or range(count)):
        words |= parts[..., source] << (bits * place)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def _awq(weight: Quantized) -> dict[str, torch.Tensor]:
    return {
        "qweight": _packed(weight.numbers.t(), 4, _AWQ_ORDER),
        "qzeros": _packed(weight.zeros.t(), 4, _AWQ_ORDER),
        "scales": weight.scales.t(),
    }


def _gptq(bits: int, less: int) -> Callable[[Quantized], dict[str, torch.Tensor]]:
    def store(weight: Quantized) -> dict[str, torch.Tensor]:
        return {
            "qweight": _packed(weight.numbers, bits).t(),
            "qzeros": _packed((weight.zeros - less).t(), bits),
            "scales": weight.scales.t(),
            "g_idx": weight.order.int(),
        }

    return store


def _compressed(weight: Quantized) -> dict[str, torch.Tensor]:
    return {
        "weight_packed": _packed(weight.numbers, 4),
        "weight_zero_point": _packed(weight.zeros.t(), 4).t(),
        "weight_scale": weight.scales,
        "weight_shape": torch.tensor(weight.numbers.shape),
    }


_STORE = {
    "awq": _awq,
    "gptq": _gptq(4, 1),
    "gptq_v2": _gptq(4, 0),
    "gptq-8": _gptq(8, 1),
    "compressed-tensors": _compressed,
}


def _config(form: str, group: int, shuffled: bool) -> dict[str, Any]:
    if form == "awq":
        return {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": group, "zero_point": True}
    if form == "compressed-tensors":
        weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group, "symmetric": False}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        }
    bits, version = (8 if form == "gptq-8" else 4), form.removesuffix("-8")
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": shuffled,
        "sym": False,
        "checkpoint_format": version,
    }
