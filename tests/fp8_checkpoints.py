"""Checkpoints of 8-bit floats, made from plain ones by the definition of each format; and the same, dequantised."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from tests.tiny_checkpoints import write_safetensors

FORMS = ("block", "tensor", "static", "channel", "tensor-static", "compressed-block", "weights-only")
"""The first three are `fp8`, the others compressed-tensors."""
_LINEARS = re.compile(r"layers\.\d+\.(self_attn\.[qkvo]|mlp\.(gate|up|down))_proj\.weight$")
_MOST = 448.0


def make_fp8(
    plain: Path,
    folder: Path,
    form: str,
    *,
    block: tuple[int, int] = (128, 128),
    some: str = "",
    shards: int = 1,
    scale_dtype: torch.dtype = torch.float32,
    input_scale: float = 0.02,
) -> tuple[Path, Path]:
    """A checkpoint of one of FORMS from a plain one, and a plain one of float32 with the same weights: folder/a,
    folder/b. some: only weights whose names have this."""
    made, same = folder / "a", folder / "b"
    shutil.copytree(plain, made)
    shutil.copytree(plain, same)
    tensors = load_file(plain / "model.safetensors")
    stored: dict[str, torch.Tensor] = {}
    for name, weight in list(tensors.items()):
        if not _LINEARS.search(name) or "visual" in name or some not in name:
            stored[name] = weight
            continue
        outer, inner = weight.shape
        by_block = "block" in form
        rows, columns = block if by_block else (1, inner) if form in ("channel", "weights-only") else (outer, inner)
        numbers, scales = _round(weight.float(), rows, columns, scale_dtype)
        tensors[name] = numbers.float() * _spread(scales.float(), rows, columns, outer, inner)
        prefix = name.removesuffix("weight")
        stored[name] = numbers
        leaf = "weight_scale_inv" if form == "block" else "weight_scale"
        whole = {"tensor": (), "static": (1,), "tensor-static": (1,)}.get(form)
        stored[prefix + leaf] = scales if whole is None else scales.reshape(whole)
        if "static" in form:
            stored[f"{prefix}input_scale"] = torch.tensor(input_scale).reshape(1)
    for file in made.glob("model*.safetensors*"):
        file.unlink()
    write_safetensors(made, stored, shards)
    write_safetensors(same, {name: value.float() for name, value in tensors.items()}, 1)
    config: dict[str, Any] = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"quantization_config": config_of(form, block)}))
    return made, same


def config_of(form: str, block: tuple[int, int]) -> dict[str, Any]:
    """The quantization_config of one of FORMS."""
    if form in ("block", "tensor", "static"):
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "static" if form == "static" else "dynamic",
            "weight_block_size": list(block) if form == "block" else None,
            "modules_to_not_convert": ["lm_head", "model.visual"],
        }
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    strategy = {"channel": "channel", "weights-only": "channel", "tensor-static": "tensor", "compressed-block": "block"}
    weights |= {"strategy": strategy[form], "block_structure": list(block) if "block" in form else None}
    inputs = {
        "channel": {"strategy": "token", "dynamic": True},
        "tensor-static": {"strategy": "tensor", "dynamic": False},
        "compressed-block": {"strategy": "group", "group_size": 128, "dynamic": True},
    }.get(form)
    inputs = None if inputs is None else {"num_bits": 8, "type": "float", **inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ["re:visual.*", "lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
    }


def _round(weight: torch.Tensor, rows: int, columns: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """weight [N, K] -> its numbers, and the scales of its blocks."""
    outer, inner = weight.shape
    scales = torch.zeros(-(-outer // rows), -(-inner // columns))
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            own = weight[row * rows : (row + 1) * rows, column * columns : (column + 1) * columns]
            scales[row, column] = own.abs().max() / _MOST
    if dtype == torch.float8_e8m0fnu:
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    stored = scales.to(dtype)
    numbers = (weight / _spread(stored.float(), rows, columns, outer, inner)).clamp(-_MOST, _MOST)
    return numbers.to(torch.float8_e4m3fn), stored


def _spread(scales: torch.Tensor, rows: int, columns: int, outer: int, inner: int) -> torch.Tensor:
    return scales.repeat_interleave(rows, 0)[:outer].repeat_interleave(columns, 1)[:, :inner]
