"""A full-size Qwen3-VL checkpoint with random weights, to measure speed and memory with.

Its tokenizer and template are the built-in model's. Rows of the embedding beyond the tokenizer's vocabulary are zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from vlmserve.commands.bench.gpu.shapes import TEXT_SIZES, VISION_SIZES, copy_built_in_settings, write_json
from vlmserve.models.random_weights import moments
from vlmserve.models.registry import load_config, make_model
from vlmserve_common.checkpoint.reader import INDEX_FILE, read_json
from vlmserve_common.checkpoint.text_tokenizer import load_text_tokenizer
from vlmserve_common.checkpoint.weights import stored_tensors

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
        write_json(folder / f"{name}_config.json", settings)
    config = read_json(folder, "config.json")
    own_head = {"tie_word_embeddings": False}
    config |= own_head
    config["text_config"] |= text_sizes | own_head | {"dtype": "bfloat16"}
    config["vision_config"] |= vision_sizes
    write_json(folder / "config.json", config)
    used_rows = load_text_tokenizer(folder).num_ids
    model = make_model(config, load_config(folder), torch.device("meta"), torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)

    def random(name: str, shape: torch.Size) -> torch.Tensor:
        mean, std = moments(name, tuple(shape))
        values = torch.randn(shape, generator=generator).mul_(std).add_(mean)
        if name.endswith("embed_tokens.weight"):
            values[used_rows:] = 0
        return values.bfloat16()

    save_weights(folder, ((name, random(name, tensor.shape)) for name, tensor in published_tensors(model)))
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

    def save() -> None:
        file = f"model-{len(set(shards.values())) + 1:05}.safetensors"
        save_file(pending, folder / file, metadata={"format": "pt"})
        shards.update(dict.fromkeys(pending, file))
        pending.clear()

    for name, tensor in tensors:
        pending[name] = tensor.cpu().contiguous()
        if sum(tensor.nbytes for tensor in pending.values()) >= _SHARD_BYTES:
            save()
    if pending:
        save()
    write_json(folder / INDEX_FILE, {"metadata": {}, "weight_map": shards})
