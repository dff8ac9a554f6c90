"""Checkpoints to measure with: published shapes and settings, without weights or with random ones.

Tokenizer and template are the built-in model's, whose ids are the first of the vocabulary. A folder without weights is
for `--load-format dummy`, which makes them on the device.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from vlmserve.commands.plan.published import SHAPES, ModelShape, config_of, decoder_sizes, tower_sizes
from vlmserve.config.model_path import DEFAULT_MODEL
from vlmserve.models.random_weights import moments
from vlmserve.models.registry import load_config, make_model
from vlmserve_common.checkpoint.hf_config import ARCHITECTURES, read_hf_config
from vlmserve_common.checkpoint.reader import INDEX_FILE, read_json
from vlmserve_common.checkpoint.text_tokenizer import load_text_tokenizer
from vlmserve_common.checkpoint.weights import stored_tensors

_CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
_HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
TEXT_IDS = 1600
"""The ids below this one are text in the built-in tokenizer."""


TEXT_SIZES: dict[str, Any] = dict(SHAPES["2b"].text) | decoder_sizes(28, 1024, 3072, 16)
TEXT_SIZES |= {"max_position_embeddings": 40960}
"""Qwen3-0.6B's decoder."""
VISION_SIZES: dict[str, Any] = dict(SHAPES["2b"].vision) | {"out_hidden_size": 1024}
"""Qwen3-VL-2B's tower, with rows as wide as that decoder."""


def small(shape: ModelShape) -> ModelShape:
    """Return a tiny shape of the same family, to try the benchmark out."""
    text = dict(shape.text) | decoder_sizes(2, 64, 96, 2)
    text |= {"num_key_value_heads": 1, "vocab_size": 4096, "max_position_embeddings": 4096}
    vision = dict(shape.vision) | tower_sizes(3, 64, 96, 64, heads=2)
    if shape.family in ("qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe"):
        text |= {"head_dim": 32}
        vision |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 256}
    else:
        vision |= {"fullatt_block_indexes": [1]}
    if "num_experts" in text:
        text |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    section = [8, 4, 4]  # of half a head's 16 frequencies
    text |= {"rope_scaling": dict(shape.text["rope_scaling"]) | {"mrope_section": section}}
    audio = None
    if shape.audio is not None:
        sizes = {"d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 96}
        audio = dict(shape.audio) | sizes | {"output_dim": 64}
        audio |= {"downsample_hidden_size": 16} if "downsample_hidden_size" in audio else {}
    return replace(shape, what=f"a tiny {shape.what}", text=text, vision=vision, audio=audio)


def write_settings(folder: Path, family: str) -> None:
    """Write a family's settings of pictures and videos into a checkpoint folder."""
    for name, settings in (("preprocessor", image_settings), ("video_preprocessor", video_settings)):
        (folder / f"{name}_config.json").write_text(json.dumps(settings(family)))


def image_settings(family: str) -> dict[str, Any]:
    """Return preprocessor_config.json as published."""
    if family in ("qwen3_omni", "qwen2_5_omni"):
        ears = {"feature_size": 128, "sampling_rate": 16000, "n_fft": 400, "hop_length": 160}
        ears["chunk_length"] = 30 if family == "qwen3_omni" else 300
        return image_settings("qwen3_vl" if family == "qwen3_omni" else "qwen2_5_vl") | ears
    if family == "qwen3_vl":
        size = {"shortest_edge": 65536, "longest_edge": 16777216}
        return {"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2, "size": size, **_HALF}
    size = {"shortest_edge": 3136, "longest_edge": 12845056}
    return {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2, "size": size, **_CLIP}


def video_settings(family: str) -> dict[str, Any]:
    """Return video_preprocessor_config.json as published; for older families, the defaults of transformers."""
    if family == "qwen3_vl":
        return image_settings(family) | {"size": {"shortest_edge": 4096, "longest_edge": 25165824}}
    return image_settings(family) | {"size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28}}


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a file of settings."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def copy_built_in_settings(folder: Path) -> None:
    """Copy the built-in model without its weights into a folder, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in (*DEFAULT_MODEL.glob("*.json"), *DEFAULT_MODEL.glob("*.jinja")):
        shutil.copyfile(file, folder / file.name)


def write_folder(folder: Path, shape: ModelShape) -> Path:
    """Write a checkpoint folder without weights, and return it."""
    copy_built_in_settings(folder)
    write_settings(folder, shape.family.removesuffix("_moe"))
    write_json(folder / "config.json", config_of(shape))
    return folder


_MIN_PIXELS, _MAX_PIXELS, _MAX_VIDEO_PIXELS = 64**2, 1024**2, 4096**2
_SHARD_BYTES = 512 * 1024**2


def write_random_checkpoint(
    folder: Path,
    *,
    text_sizes: dict[str, Any] = TEXT_SIZES,
    vision_sizes: dict[str, Any] = VISION_SIZES,
    family: str = "qwen3_vl",
    shape: ModelShape | None = None,
    seed: int = 0,
) -> Path:
    """Write the checkpoint in bfloat16 and in shards into `folder`, which is made if need be, and return the folder.

    The same seed writes the same bytes. text_sizes, vision_sizes: the fields of `text_config` and `vision_config` that
    differ from the built-in model's. family: model_type. shape: of a published model, in place of these.
    """
    if shape is not None:
        return _write_random_weights(write_folder(folder, shape), seed)
    copy_built_in_settings(folder)
    for name, most in (("preprocessor", _MAX_PIXELS), ("video_preprocessor", _MAX_VIDEO_PIXELS)):
        settings = read_json(folder, f"{name}_config.json")
        settings["size"] = {"shortest_edge": _MIN_PIXELS, "longest_edge": most}
        write_json(folder / f"{name}_config.json", settings)
    config = read_json(folder, "config.json")
    own_head = {"tie_word_embeddings": False}
    config |= own_head | {"model_type": family, "architectures": [ARCHITECTURES[family]]}
    config["text_config"] |= text_sizes | own_head | {"dtype": "bfloat16", "model_type": f"{family}_text"}
    config["vision_config"] |= vision_sizes | {"model_type": family}
    write_json(folder / "config.json", config)
    return _write_random_weights(folder, seed)


def _write_random_weights(folder: Path, seed: int) -> Path:
    used_rows = load_text_tokenizer(folder).num_ids
    model = make_model(read_hf_config(folder), load_config(folder), torch.device("meta"), torch.bfloat16)
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
    """Yield all parameters by their names in published checkpoints from Qwen3-VL on and in transformers' models, or in
    those of Omni models.

    The tensors are views of the stored shape.
    """
    hears = any(name.startswith("visual.ears.") for name, _ in model.named_parameters())
    for stored, tensor in stored_tensors(model):
        if stored.startswith(mixer := "language_model.norm.") and stored != f"{mixer}weight":
            stored = stored.replace(mixer, "language_model.hyper_connection_mixer.")
        if hears:
            name = stored.replace("visual.ears.", "audio_tower.").replace("language_model.", "model.", 1)
            yield f"thinker.{name}", tensor
        else:
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
