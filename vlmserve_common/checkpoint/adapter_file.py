"""Reads LoRA adapters as PEFT writes them. What they change is in `compute.lora`.

An adapter is a folder: `adapter_config.json`, and `adapter_model.safetensors` with two factors for each layer that it
changes, `MODULE.lora_A.weight` [rank, inputs] and `MODULE.lora_B.weight` [outputs, rank]. W becomes W + s B A. Pickled
weights are never read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blake3
import safetensors
import safetensors.torch
import torch

from vlmserve_common.checkpoint.fields import Fields
from vlmserve_common.errors import CheckpointError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)(?:\.default)?\.weight")
_LISTED = 6
# Fields of a config that ask for more than factors, with the values that ask for nothing.
_BEYOND: Mapping[str, tuple[object, ...]] = {
    "use_dora": (False,),
    "bias": ("none",),
    "lora_bias": (False,),
    "modules_to_save": ([],),
    "layer_replication": ([],),
    "trainable_token_indices": ([], {}),
    "alora_invocation_tokens": ([],),
    "use_qalora": (False,),
    "fan_in_fan_out": (False,),
}
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to begin training that change the base's weights, too."""


@dataclass(frozen=True, kw_only=True)
class LoraPair:
    """The factors of one module: a [rank, inputs], b [outputs, rank], of any float dtype. Experts in one tensor have
    theirs side by side, see `compute.lora`."""

    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class AdapterFile:
    """An adapter as it lies on disk. pairs: by the module's name there, without `base_model.model.`."""

    folder: Path
    digest: str
    config: LoraConfig
    pairs: Mapping[str, LoraPair]


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """The ranks and scales of modules. Patterns are regular expressions for the end of a module's name, from a dot
    on; the first that fits counts."""

    rank: int
    alpha: float
    ranks: Mapping[str, float]
    alphas: Mapping[str, float]
    stabilised: bool

    def scale(self, module: str, rank: int) -> float:
        """Return the scale of a module whose factors have this rank. CheckpointError if it should have another."""
        expected = int(_of_pattern(self.ranks, module, self.rank))
        if rank != expected:
            raise CheckpointError(f"{module} has factors of rank {rank}, and {CONFIG} says {expected}")
        alpha = _of_pattern(self.alphas, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.stabilised else rank)


def read_adapter(folder: Path, *, max_rank: int) -> AdapterFile:
    """Read a folder. CheckpointError for one that is no LoRA adapter, is broken, asks for more than factors, or has a
    rank above max_rank."""
    try:
        is_folder = folder.is_dir()
    except OSError as error:  # no permission, or a name that is too long
        raise CheckpointError(f"{folder}: {error.strerror}") from None
    if not is_folder:
        raise CheckpointError(f"{folder} is no folder with a LoRA adapter")
    raw = _read(folder, CONFIG)
    try:
        values = json.loads(raw)
    except ValueError as error:
        raise CheckpointError(f"{folder / CONFIG} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{folder / CONFIG}: a JSON object is expected")
    config = _config(Fields(values, str(folder / CONFIG)))
    if max((config.rank, *config.ranks.values())) > max_rank:
        highest = int(max((config.rank, *config.ranks.values())))
        raise CheckpointError(f"{folder}: its rank is {highest}, the limit is {max_rank} (setting --max-lora-rank)")
    data = _read(folder, WEIGHTS)
    try:
        tensors = safetensors.torch.load(data)
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder / WEIGHTS} is no whole safetensors file: {error}") from None
    digest = blake3.blake3(len(raw).to_bytes(8, "little") + raw).update(data).hexdigest(length=16)
    return AdapterFile(folder=folder, digest=digest, config=config, pairs=_pairs(folder, tensors))


def _read(folder: Path, name: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except FileNotFoundError:
        pickled = (
            "; adapter_model.bin is pickled, which is never read" if (folder / "adapter_model.bin").exists() else ""
        )
        raise CheckpointError(f"{folder} has no {name}{pickled if name == WEIGHTS else ''}") from None
    except OSError as error:
        raise CheckpointError(f"{folder / name}: {error}") from None


def _config(fields: Fields) -> LoraConfig:
    values = fields.values
    if (kind := values.get("peft_type")) != "LORA":
        raise CheckpointError(f"{fields.where}: peft_type is {kind!r}; only LORA is supported")
    for name, nothing in _BEYOND.items():
        if (value := values.get(name)) is not None and value not in nothing:
            raise CheckpointError(
                f"{fields.where}: {name} is {value!r}, which is not supported: only lora_A and lora_B are"
            )
    begun = str(values.get("init_lora_weights")).lower()
    if begun.startswith(_CHANGES_BASE):
        raise CheckpointError(
            f"{fields.where}: init_lora_weights is {begun!r}: such an adapter belongs to changed weights of the base; "
            "save it converted (PEFT's path_initial_model_for_weight_conversion)"
        )
    return LoraConfig(
        rank=fields.positive("r"),
        alpha=fields.number("lora_alpha"),
        ranks=_pattern(values.get("rank_pattern"), fields.where, "rank_pattern"),
        alphas=_pattern(values.get("alpha_pattern"), fields.where, "alpha_pattern"),
        stabilised=bool(values.get("use_rslora")),
    )


def _pattern(given: Any, where: str, name: str) -> dict[str, float]:
    patterns = given or {}
    if not isinstance(patterns, dict) or not all(isinstance(value, int | float) for value in patterns.values()):
        raise CheckpointError(f"{where}: {name} is {given!r}, not numbers by patterns")
    for pattern, value in patterns.items():
        try:
            re.compile(pattern)
        except re.error as error:
            raise CheckpointError(f"{where}: {name} has {pattern!r}, which is no regular expression: {error}") from None
        if value <= 0:
            raise CheckpointError(f"{where}: {name} of {pattern!r} is {value}, and must be above 0")
    return patterns


def _of_pattern(patterns: Mapping[str, float], module: str, otherwise: float) -> float:
    found = (value for pattern, value in patterns.items() if re.fullmatch(rf"(.*\.)?({pattern})", module))
    return next(found, otherwise)


def _pairs(folder: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, LoraPair]:
    """Pair the factors up. CheckpointError for other tensors, and for single factors."""
    halves: dict[str, dict[str, torch.Tensor]] = {}
    others = []
    for key, tensor in tensors.items():
        found = _KEY.fullmatch(key)
        if found is None or tensor.ndim != 2 or not tensor.dtype.is_floating_point:
            others.append(key)
        else:
            halves.setdefault(found[1], {})[found[2]] = tensor
    if others:
        raise CheckpointError(f"{folder / WEIGHTS}: {listed(others)}: only matrices lora_A and lora_B are supported")
    single = [f"{name}.lora_{'A' if 'B' in own else 'B'}.weight" for name, own in halves.items() if len(own) < 2]
    if single:
        raise CheckpointError(f"{folder / WEIGHTS}: {listed(single)} is missing, while the other factor is there")
    if not halves:
        raise CheckpointError(f"{folder / WEIGHTS} has no lora_A and lora_B: the adapter is empty")
    return {name: LoraPair(a=own["A"], b=own["B"]) for name, own in halves.items()}


def listed(names: list[str]) -> str:
    """Return the first few names."""
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
