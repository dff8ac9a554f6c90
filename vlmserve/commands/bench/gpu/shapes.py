"""The published shapes of models that `vlmserve bench gpu` measures, and how much it asks of them.

A folder of such a model has no weights: these are made on the device (`--load-format dummy`). Tokenizer and template
are the built-in model's, whose ids are the first of the vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vlmserve.commands.bench.processor_reference import write_settings
from vlmserve.commands.bench.random_checkpoint import copy_built_in_settings
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


_QWEN3_TEXT = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 262144,
    "rope_theta": 5_000_000,
    "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]},
}
_QWEN3_VISION = {"num_heads": 16, "patch_size": 16, "num_position_embeddings": 2304}
_QWEN3_8B_VISION = _QWEN3_VISION | {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "out_hidden_size": 4096,
    "deepstack_visual_indexes": [8, 16, 24],
}
_QWEN2_5_VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "num_heads": 16,
    "intermediate_size": 3420,
    "patch_size": 14,
    "out_hidden_size": 3584,
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
            text=_QWEN3_TEXT
            | {"num_hidden_layers": 28, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16},
            vision=_QWEN3_VISION
            | {
                "depth": 24,
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "out_hidden_size": 2048,
                "deepstack_visual_indexes": [5, 11, 17],
            },
        ),
        "8b": ModelShape(
            what="Qwen3-VL-8B",
            family="qwen3_vl",
            tied=False,
            text=_QWEN3_TEXT
            | {"num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32},
            vision=_QWEN3_8B_VISION,
        ),
        "qwen2.5-7b": ModelShape(
            what="Qwen2.5-VL-7B",
            family="qwen2_5_vl",
            tied=False,
            text={
                "num_hidden_layers": 28,
                "hidden_size": 3584,
                "intermediate_size": 18944,
                "num_attention_heads": 28,
                "num_key_value_heads": 4,
                "vocab_size": 152064,
                "max_position_embeddings": 128000,
                "rope_theta": 1_000_000,
                "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [16, 24, 24]},
            },
            vision=_QWEN2_5_VISION,
        ),
        "30b-a3b": ModelShape(
            what="Qwen3-VL-30B-A3B",
            family="qwen3_vl_moe",
            tied=False,
            text=_QWEN3_TEXT
            | {
                "num_hidden_layers": 48,
                "hidden_size": 2048,
                "intermediate_size": 6144,
                "num_attention_heads": 32,
                "num_key_value_heads": 4,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 768,
            },
            vision=_QWEN3_8B_VISION | {"out_hidden_size": 2048},
        ),
    }
)

_SMALL_TEXT: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 4096,
    "max_position_embeddings": 4096,
}


def small(shape: ModelShape) -> ModelShape:
    """Return a tiny shape of the same family, to try the benchmark out."""
    text, vision = dict(shape.text) | _SMALL_TEXT, dict(shape.vision)
    vision |= {"depth": 3, "hidden_size": 64, "num_heads": 2, "intermediate_size": 96, "out_hidden_size": 64}
    if shape.family in ("qwen3_vl", "qwen3_vl_moe"):
        text |= {"head_dim": 32}
        vision |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 256}
    else:
        vision |= {"fullatt_block_indexes": [1]}
    if "num_experts" in text:
        text |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    section = [8, 4, 4]  # of half a head's 16 frequencies
    text |= {"rope_scaling": dict(shape.text["rope_scaling"]) | {"mrope_section": section}}
    return ModelShape(what=f"a tiny {shape.what}", family=shape.family, tied=shape.tied, text=text, vision=vision)


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
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return folder


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuLoad:
    """The work of a run.

    The tower's batch has `pictures` of side x side pixels. A `prompt` has that many tokens. `batches` are numbers of
    requests that decode together for `steps` steps, behind `context` tokens each. `many` is a number of questions about
    a picture of many_side x many_side pixels, with `answer` tokens; `alone` of them come one at a time. `copy_bytes`
    and `gemms` are the bytes and rows that measure the device.
    """

    pictures: int
    side: int
    prompt: int
    batches: tuple[int, ...]
    overlap_batch: int
    context: int
    steps: int
    many: int
    many_side: int
    answer: int
    alone: int
    copy_bytes: int
    gemms: tuple[int, ...] = field(default=(4096, 8192, 16384))

    @property
    def patch_limit(self) -> int:
        """The most patches of the tower's batch: those of 14 pixels, the smallest there are."""
        return self.pictures * (self.side // 14 + 2) ** 2


FULL = GpuLoad(
    pictures=16,
    side=1024,
    prompt=8192,
    batches=(1, 8, 64, 256),
    overlap_batch=64,
    context=1024,
    steps=32,
    many=256,
    many_side=512,
    answer=128,
    alone=8,
    copy_bytes=4 * 2**30,
)
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
