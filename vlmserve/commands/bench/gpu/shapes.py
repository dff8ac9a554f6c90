"""The published shapes of models that `vlmserve bench gpu` measures, and how much it asks of them.

A folder of such a model has no weights: these are made on the device (`--load-format dummy`). Tokenizer and template
are the built-in model's, whose ids are the first of the vocabulary.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vlmserve.commands.bench.processor_reference import write_settings
from vlmserve.config.model_path import DEFAULT_MODEL
from vlmserve_common.checkpoint.hf_config import ARCHITECTURES
from vlmserve_common.checkpoint.reader import read_json

TEXT_IDS = 1600
"""The ids below this one are text in the built-in tokenizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A published shape. family: model_type. tied: True if the embedding is the head. text, vision: of config.json."""

    what: str
    family: str
    tied: bool
    text: Mapping[str, Any]
    vision: Mapping[str, Any]


def _decoder(layers: int, width: int, inner: int, heads: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
    }


def _tower(layers: int, width: int, inner: int, out: int, heads: int = 16) -> dict[str, Any]:
    return {
        "depth": layers,
        "hidden_size": width,
        "intermediate_size": inner,
        "out_hidden_size": out,
        "num_heads": heads,
    }


_QWEN3_TEXT = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
    "rope_theta": 5_000_000,
    "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]},
}
_QWEN3_VISION = {"patch_size": 16, "num_position_embeddings": 2304}
_2B_VISION = _QWEN3_VISION | _tower(24, 1024, 4096, 2048) | {"deepstack_visual_indexes": [5, 11, 17]}
_8B_VISION = _QWEN3_VISION | _tower(27, 1152, 4304, 4096) | {"deepstack_visual_indexes": [8, 16, 24]}
_30B_EXPERTS = {
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
_QWEN2_5_TEXT = {
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 128000,
    "rope_theta": 1_000_000,
    "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [16, 24, 24]},
}
_QWEN2_5_VISION = {
    "patch_size": 14,
    "hidden_act": "silu",
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "tokens_per_second": 2,
}

SHAPES: Mapping[str, ModelShape] = MappingProxyType(
    {
        "2b": ModelShape(
            what="Qwen3-VL-2B",
            family="qwen3_vl",
            tied=True,
            text=_QWEN3_TEXT | _decoder(28, 2048, 6144, 16),
            vision=_2B_VISION,
        ),
        "8b": ModelShape(
            what="Qwen3-VL-8B",
            family="qwen3_vl",
            tied=False,
            text=_QWEN3_TEXT | _decoder(36, 4096, 12288, 32),
            vision=_8B_VISION,
        ),
        "qwen2.5-7b": ModelShape(
            what="Qwen2.5-VL-7B",
            family="qwen2_5_vl",
            tied=False,
            text=_QWEN2_5_TEXT | _decoder(28, 3584, 18944, 28),
            vision=_QWEN2_5_VISION | _tower(32, 1280, 3420, 3584),
        ),
        "30b-a3b": ModelShape(
            what="Qwen3-VL-30B-A3B",
            family="qwen3_vl_moe",
            tied=False,
            text=_QWEN3_TEXT | _decoder(48, 2048, 6144, 32) | _30B_EXPERTS,
            vision=_8B_VISION | {"out_hidden_size": 2048},
        ),
    }
)
TEXT_SIZES: dict[str, Any] = _QWEN3_TEXT | _decoder(28, 1024, 3072, 16) | {"max_position_embeddings": 40960}
"""Qwen3-0.6B's decoder."""
VISION_SIZES: dict[str, Any] = _2B_VISION | {"out_hidden_size": 1024}
"""Qwen3-VL-2B's tower, with rows as wide as that decoder."""


def small(shape: ModelShape) -> ModelShape:
    """Return a tiny shape of the same family, to try the benchmark out."""
    text = dict(shape.text) | _decoder(2, 64, 96, 2)
    text |= {"num_key_value_heads": 1, "vocab_size": 4096, "max_position_embeddings": 4096}
    vision = dict(shape.vision) | _tower(3, 64, 96, 64, heads=2)
    if shape.family in ("qwen3_vl", "qwen3_vl_moe"):
        text |= {"head_dim": 32}
        vision |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 256}
    else:
        vision |= {"fullatt_block_indexes": [1]}
    if "num_experts" in text:
        text |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    section = [8, 4, 4]  # of half a head's 16 frequencies
    text |= {"rope_scaling": dict(shape.text["rope_scaling"]) | {"mrope_section": section}}
    return replace(shape, what=f"a tiny {shape.what}", text=text, vision=vision)


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
    built_in = read_json(folder, "config.json")
    write_settings(folder, shape.family.removesuffix("_moe"))
    shared = {"dtype": "bfloat16", "tie_word_embeddings": shape.tied}
    kept = ("hidden_act", "rms_norm_eps", "bos_token_id", "eos_token_id")
    text = {name: built_in["text_config"][name] for name in kept} | dict(shape.text) | shared
    base = {"in_channels": 3, "temporal_patch_size": 2, "spatial_merge_size": 2, "hidden_act": "gelu_pytorch_tanh"}
    config = {
        **{name: value for name, value in built_in.items() if name.endswith("_token_id")},
        **shared,
        "architectures": [ARCHITECTURES[shape.family]],
        "model_type": shape.family,
        "text_config": {"model_type": f"{shape.family}_text", **text},
        "vision_config": {"model_type": shape.family, **base, **shape.vision},
    }
    write_json(folder / "config.json", config)
    return folder


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuLoad:
    """The work of a run.

    The tower's batch has `pictures` of side x side pixels. A `prompt` has that many tokens. `batches` are numbers of
    requests that decode together for `steps` steps, behind `context` tokens each. `many` is a number of questions about
    a picture of many_side x many_side pixels, with `answer` tokens; `alone` of them come one at a time. `copy_bytes`
    and `gemms` are the bytes and rows that measure the device.
    """

    pictures: int = 16
    side: int = 1024
    prompt: int = 8192
    batches: tuple[int, ...] = (1, 8, 64, 256)
    overlap_batch: int = 64
    context: int = 1024
    steps: int = 32
    many: int = 256
    many_side: int = 512
    answer: int = 128
    alone: int = 8
    copy_bytes: int = 4 * 2**30
    gemms: tuple[int, ...] = (4096, 8192, 16384)

    @property
    def patch_limit(self) -> int:
        """The most patches of the tower's batch: those of 14 pixels, the smallest there are."""
        return self.pictures * (self.side // 14 + 2) ** 2


FULL = GpuLoad()
SMALL = GpuLoad(
    pictures=2,
    side=128,
    prompt=64,
    batches=(1, 4),
    overlap_batch=4,
    context=16,
    steps=4,
    many=4,
    many_side=64,
    answer=4,
    alone=1,
    copy_bytes=2**20,
    gemms=(64,),
)
