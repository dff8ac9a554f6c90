"""A full-size Qwen3-VL checkpoint with random weights, to measure speed and memory with.

Its tokenizer and template are the built-in model's. Rows of the embedding beyond the tokenizer's vocabulary are zero.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from vlmserve.config.model_path import DEFAULT_MODEL
from vlmserve.models.random_weights import moments
from vlmserve.models.registry import load_config, make_model
from vlmserve_common.checkpoint.reader import INDEX_FILE, read_json
from vlmserve_common.checkpoint.text_tokenizer import load_text_tokenizer
from vlmserve_common.checkpoint.weights import stored_tensors

# Qwen3-0.6B's decoder
TEXT_SIZES: dict[str, Any] = {
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 5_000_000,
    "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]},
}
# Qwen3-VL-2B's tower, with rows as wide as that decoder
VISION_SIZES: dict[str, Any] = {
    "depth": 24,
    "hidden_size": 1024,
    "num_heads": 16,
    "intermediate_size": 4096,
    "patch_size": 16,
    "out_hidden_size": 1024,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [5, 11, 17],
}
_MIN_PIXELS, _MAX_PIXELS, _MAX_VIDEO_PIXELS = 64**2, 1024**2, 4096**2
_SHARD_BYTES = 512 * 1024**2


def write_random_checkpoint(
    folder: Path,
    *,
    text_sizes: dict[str, Any] = TEXT_SIZES,
    vision_sizes: dict[str, Any] = VISION_SIZES,
    seed: int = 0,
) -> Path:
    """Write the checkpoint in bfloat16 and in shards into `folder`, which is made if need be, and return the folder.

    The same seed writes the same bytes. text_sizes, vision_sizes: the fields of `text_config` and `vision_config` that
    differ from the built-in model's.
    """
    copy_built_in_settings(folder)
    for name, most in (("preprocessor", _MAX_PIXELS), ("video_preprocessor", _MAX_VIDEO_PIXELS)):
        settings = read_json(folder, f"{name}_config.json")
        settings["size"] = {"shortest_edge": _MIN_PIXELS, "longest_edge": most}
        _write_json(folder / f"{name}_config.json", settings)
    config = read_json(folder, "config.json")
    own_head = {"tie_word_embeddings": False}
    config |= own_head
    config["text_config"] |= text_sizes | own_head | {"dtype": "bfloat16"}
    config["vision_config"] |= vision_sizes
    _write_json(folder / "config.json", config)
    used_rows = load_text_tokenizer(folder).num_ids
    model = make_model(config, load_config(folder), torch.device("meta"), torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    save_weights(
        folder,
        (
            (name, _random(name, tuple(tensor.shape), used_rows, generator).bfloat16())
            for name, tensor in published_tensors(model)
        ),
    )
    return folder


def published_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all parameters by their names in published checkpoints of Qwen3-VL and in transformers' models.

    The tensors are views of the stored shape.
    """
    for stored, tensor in stored_tensors(model):
        yield stored if stored.startswith("lm_head.") else f"model.{stored}", tensor


def save_weights(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write tensors into a checkpoint folder, in shards."""
    shards: dict[str, str] = {}
    pending: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        pending[name] = tensor.cpu().contiguous()
        if sum(tensor.nbytes for tensor in pending.values()) >= _SHARD_BYTES:
            _save_shard(folder, pending, shards)
    _save_shard(folder, pending, shards)
    _write_json(folder / INDEX_FILE, {"metadata": {}, "weight_map": shards})


def copy_built_in_settings(folder: Path) -> None:
    """Copy the built-in model without its weights into a folder, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in (*DEFAULT_MODEL.glob("*.json"), *DEFAULT_MODEL.glob("*.jinja")):
        shutil.copyfile(file, folder / file.name)


def _random(name: str, shape: tuple[int, ...], used_rows: int, generator: torch.Generator) -> torch.Tensor:
    mean, std = moments(name, shape)
    values = torch.randn(shape, generator=generator).mul_(std).add_(mean)
    if name.endswith("embed_tokens.weight"):
        values[used_rows:] = 0
    return values


def _save_shard(folder: Path, pending: dict[str, torch.Tensor], shards: dict[str, str]) -> None:
    """Write and forget the pending tensors; `shards` notes where they went."""
    if not pending:
        return
    file = f"model-{len(set(shards.values())) + 1:05}.safetensors"
    save_file(pending, folder / file, metadata={"format": "pt"})
    shards.update(dict.fromkeys(pending, file))
    pending.clear()


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
