"""LoRA adapters for tiny checkpoints, as PEFT writes them, and checkpoints that have an adapter in their weights."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ALPHA = 8


def linears_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return the weights of layers that an adapter may change, by the names of PEFT's modules."""
    tensors = load_file(checkpoint / "model.safetensors")
    layer = re.compile(r"(?:.*\.)?(?:layers|blocks|merger|deepstack_merger_list)\..*|.*\.merger\..*")
    return {
        name.removesuffix(".weight"): tensor
        for name, tensor in tensors.items()
        if name.endswith(".weight") and tensor.ndim == 2 and layer.fullmatch(name) and "mtp" not in name
    }


def write_adapter(
    checkpoint: Path,
    out: Path,
    *,
    seed: int,
    rank: int = 4,
    modules: str = ".*",
    rename: Callable[[str], str] = str,
    **config: object,
) -> Path:
    """Write an adapter for the modules whose names fit, and change each weight by a third of its size."""
    out.mkdir(parents=True)
    random, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in linears_of(checkpoint).items():
        if re.fullmatch(modules, name):
            a = torch.randn(rank, weight.shape[1], generator=random)
            b = torch.randn(len(weight), rank, generator=random)
            b *= 0.35 * weight.norm() / (ALPHA / rank * (b @ a)).norm()
            key = f"base_model.model.{rename(name)}"
            tensors |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
    assert tensors, "no module fits"
    save_file(tensors, out / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, "bias": "none", **config}
    (out / "adapter_config.json").write_text(json.dumps(fields))
    return out


def with_adapter(checkpoint: Path, adapter: Path, out: Path) -> Path:
    """Write a checkpoint whose weights have an adapter, which was written without `rename`."""
    shutil.copytree(checkpoint, out)
    tensors, factors = load_file(out / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    rank = json.loads((adapter / "adapter_config.json").read_text())["r"]
    for key, a in factors.items():
        if key.endswith(".lora_A.weight"):
            name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            tensors[f"{name}.weight"] += ALPHA / rank * factors[key.replace("lora_A", "lora_B")] @ a
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out
