"""Published models of the Qwen-VL family, by their sizes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vlmserve.config.model_path import DEFAULT_MODEL
from vlmserve_common.checkpoint.fields import read_json
from vlmserve_common.checkpoint.hf_config import ARCHITECTURES


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A published shape. family: model_type. tied: True if the embedding is the head. text, vision, audio: of
    config.json; audio is None for a model without ears."""

    what: str
    family: str
    tied: bool
    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    audio: Mapping[str, Any] | None = None

    @property
    def hub_id(self) -> str:
        """The model's name on the hub."""
        return f"Qwen/{self.what}" + "-Instruct" * ("VL" in self.what or "Qwen3-Omni" in self.what)


def decoder_sizes(layers: int, width: int, inner: int, heads: int) -> dict[str, Any]:
    """Return the fields of `text_config` about sizes."""
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_attention_heads": heads,
    }


def tower_sizes(layers: int, width: int, inner: int, out: int, heads: int = 16) -> dict[str, Any]:
    """Return the fields of `vision_config` about sizes."""
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
_2B_VISION = _QWEN3_VISION | tower_sizes(24, 1024, 4096, 2048) | {"deepstack_visual_indexes": [5, 11, 17]}
_8B_VISION = _QWEN3_VISION | tower_sizes(27, 1152, 4304, 4096) | {"deepstack_visual_indexes": [8, 16, 24]}
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


def _shape(
    what: str, family: str, text: Mapping[str, Any], vision: Mapping[str, Any], *, tied: bool = False
) -> ModelShape:
    return ModelShape(what=what, family=family, tied=tied, text=text, vision=vision)


_2B_TEXT = _QWEN3_TEXT | decoder_sizes(28, 2048, 6144, 16)
_3B_TEXT = _QWEN2_5_TEXT | decoder_sizes(36, 2048, 11008, 16) | {"num_key_value_heads": 2, "vocab_size": 151936}
_30B_TEXT = _QWEN3_TEXT | decoder_sizes(48, 2048, 6144, 32) | _30B_EXPERTS
_235B_TEXT = _30B_TEXT | decoder_sizes(94, 4096, 12288, 64) | {"moe_intermediate_size": 1536}
SHAPES: Mapping[str, ModelShape] = MappingProxyType(
    {
        "2b": _shape("Qwen3-VL-2B", "qwen3_vl", _2B_TEXT, _2B_VISION, tied=True),
        "qwen2.5-3b": _shape(
            "Qwen2.5-VL-3B",
            "qwen2_5_vl",
            _3B_TEXT,
            _QWEN2_5_VISION | tower_sizes(32, 1280, 3420, 2048),
            tied=True,
        ),
        "4b": _shape(
            "Qwen3-VL-4B",
            "qwen3_vl",
            _QWEN3_TEXT | decoder_sizes(36, 2560, 9728, 32),
            _2B_VISION | {"out_hidden_size": 2560},
            tied=True,
        ),
        "qwen2.5-7b": _shape(
            "Qwen2.5-VL-7B",
            "qwen2_5_vl",
            _QWEN2_5_TEXT | decoder_sizes(28, 3584, 18944, 28),
            _QWEN2_5_VISION | tower_sizes(32, 1280, 3420, 3584),
        ),
        "8b": _shape("Qwen3-VL-8B", "qwen3_vl", _QWEN3_TEXT | decoder_sizes(36, 4096, 12288, 32), _8B_VISION),
        "30b-a3b": _shape("Qwen3-VL-30B-A3B", "qwen3_vl_moe", _30B_TEXT, _8B_VISION | {"out_hidden_size": 2048}),
        "32b": _shape(
            "Qwen3-VL-32B",
            "qwen3_vl",
            _QWEN3_TEXT | decoder_sizes(64, 5120, 25600, 64),
            _8B_VISION | {"out_hidden_size": 5120},
        ),
        "235b-a22b": _shape("Qwen3-VL-235B-A22B", "qwen3_vl_moe", _235B_TEXT, _8B_VISION),
    }
)
"""The models that are measured with, the smallest first."""

_QWEN2_TEXT = _QWEN2_5_TEXT | {"max_position_embeddings": 32768}
_72B_SIZES = decoder_sizes(80, 8192, 29568, 64) | {"num_key_value_heads": 8}
_QWEN3_5_TEXT = {
    "head_dim": 256,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
    },
}
_35B_EXPERTS = {
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}


_FLASH_NEXT = decoder_sizes(48, 2560, 640, 24) | {
    "num_key_value_heads": 2,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 640,
    "shared_expert_intermediate_size": 640,
    "linear_num_value_heads": 48,
    "output_gate_type": "sigmoid",
    "eos_token_id": 248044,
    "hc_count": 4,
    "hc_lowrank": 320,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "ple_layer_ids": [2],
    "ple_embed_dim": 2560,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20_000_000,
    "make_ngram_vocab_size_divisible_by": 128,
    "split_ngram_parts": 128,
}


def _qwen2_vl(what: str, text: Mapping[str, Any], *, tied: bool = False) -> ModelShape:
    vision: dict[str, Any] = {"depth": 32, "embed_dim": 1280, "mlp_ratio": 4, "num_heads": 16, "patch_size": 14}
    vision |= {"hidden_size": text["hidden_size"], "hidden_act": "quick_gelu"}
    return _shape(what, "qwen2_vl", text, vision, tied=tied)


def _larger_qwen2_5(what: str, text: Mapping[str, Any]) -> ModelShape:
    vision = _QWEN2_5_VISION | tower_sizes(32, 1280, 3456, text["hidden_size"])
    return _shape(what, "qwen2_5_vl", text, vision)


def _qwen3_5(what: str, family: str, text: Mapping[str, Any]) -> ModelShape:
    vision = _QWEN3_VISION | tower_sizes(27, 1152, 4304, text["hidden_size"]) | {"deepstack_visual_indexes": []}
    return _shape(what, family, {**_QWEN3_5_TEXT, **text}, vision)


_QWEN2_5_AUDIO = {"n_window": 100}
_QWEN3_AUDIO = {"n_window": 50, "n_window_infer": 800, "downsample_hidden_size": 480}


def _omni(
    what: str, family: str, text: Mapping[str, Any], vision: Mapping[str, Any], audio: Mapping[str, Any]
) -> ModelShape:
    width = text["hidden_size"]
    sizes = {"d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120}
    return ModelShape(
        what=what,
        family=family,
        tied=False,
        text=text,
        vision={**vision, "out_hidden_size": width},
        audio={"num_mel_bins": 128, "output_dim": width, **sizes, **audio},
    )


_QWEN2_5_OMNI_VISION = _QWEN2_5_VISION | tower_sizes(32, 1280, 3420, 0) | {"tokens_per_second": 25}
PUBLISHED: Sequence[ModelShape] = (
    SHAPES["2b"],
    _qwen2_vl(
        "Qwen2-VL-2B",
        _QWEN2_TEXT | decoder_sizes(28, 1536, 8960, 12) | {"num_key_value_heads": 2, "vocab_size": 151936},
        tied=True,
    ),
    SHAPES["qwen2.5-3b"],
    SHAPES["4b"],
    _omni(
        "Qwen2.5-Omni-3B",
        "qwen2_5_omni",
        _3B_TEXT | {"max_position_embeddings": 32768},
        _QWEN2_5_OMNI_VISION,
        _QWEN2_5_AUDIO,
    ),
    _qwen2_vl("Qwen2-VL-7B", _QWEN2_TEXT | decoder_sizes(28, 3584, 18944, 28)),
    SHAPES["qwen2.5-7b"],
    SHAPES["8b"],
    _omni(
        "Qwen2.5-Omni-7B",
        "qwen2_5_omni",
        _QWEN2_TEXT | decoder_sizes(28, 3584, 18944, 28),
        _QWEN2_5_OMNI_VISION,
        _QWEN2_5_AUDIO,
    ),
    _qwen3_5("Qwen3.5-9B", "qwen3_5", decoder_sizes(32, 4096, 12288, 16) | {"num_key_value_heads": 4}),
    SHAPES["30b-a3b"],
    _omni(
        "Qwen3-Omni-30B-A3B",
        "qwen3_omni_moe",
        _30B_TEXT
        | {"vocab_size": 152064, "intermediate_size": 768, "max_position_embeddings": 65536, "rope_theta": 1_000_000},
        _8B_VISION,
        _QWEN3_AUDIO,
    ),
    SHAPES["32b"],
    _larger_qwen2_5("Qwen2.5-VL-32B", _QWEN2_5_TEXT | decoder_sizes(64, 5120, 27648, 40) | {"num_key_value_heads": 8}),
    _qwen3_5("Qwen3.5-35B-A3B", "qwen3_5_moe", decoder_sizes(40, 2048, 512, 16) | _35B_EXPERTS),
    _qwen2_vl("Qwen2-VL-72B", _QWEN2_TEXT | _72B_SIZES),
    _larger_qwen2_5("Qwen2.5-VL-72B", _QWEN2_5_TEXT | _72B_SIZES),
    _qwen3_5("Qwen3.8-Flash-Next", "qwen4_exp", _FLASH_NEXT),
    SHAPES["235b-a22b"],
)
"""The models that are planned for, the smallest first."""


_AUDIO_IDS = ("audio_token_id", "audio_start_token_id", "audio_end_token_id")


def config_of(shape: ModelShape) -> dict[str, Any]:
    """Return the model's config.json."""
    built_in = read_json(DEFAULT_MODEL, "config.json")
    shared = {"dtype": "bfloat16", "tie_word_embeddings": shape.tied}
    kept = ("hidden_act", "rms_norm_eps", "bos_token_id", "eos_token_id")
    text = {name: built_in["text_config"][name] for name in kept} | dict(shape.text) | shared
    base = {"in_channels": 3, "temporal_patch_size": 2, "spatial_merge_size": 2, "hidden_act": "gelu_pytorch_tanh"}
    named = {"architectures": [ARCHITECTURES[shape.family]], "model_type": shape.family}
    config = {
        **{name: value for name, value in built_in.items() if name.endswith("_token_id")},
        **shared,
        **named,
        "text_config": {"model_type": f"{shape.family}_text", **text},
        "vision_config": {"model_type": shape.family, **base, **shape.vision},
    }
    if shape.audio is None:
        return config
    # ids that the built-in tokenizer does not have
    ids = {name: text["vocab_size"] - 3 + place for place, name in enumerate(_AUDIO_IDS)}
    seconds = {"position_id_per_seconds": 25 if shape.family == "qwen2_5_omni" else 13, "seconds_per_chunk": 2}
    return {**named, **shared, "thinker_config": {**config, **ids, **seconds, "audio_config": dict(shape.audio)}}


def write_config(shape: ModelShape, folder: Path) -> Path:
    """Write the model's config.json into a folder. Returns the folder."""
    (folder / "config.json").write_text(json.dumps(config_of(shape)))
    return folder
