"""The family and dtype of a checkpoint, as all parts of a model read them in its config.json. Imports torch late."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vlmserve_common.checkpoint.fields import Fields, read_json
from vlmserve_common.errors import CheckpointError

if TYPE_CHECKING:
    import torch

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "qwen2_vl": "Qwen2VLForConditionalGeneration",
        "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
        "qwen3_vl": "Qwen3VLForConditionalGeneration",
        "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
        "qwen3_5": "Qwen3_5ForConditionalGeneration",
        "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
        "qwen4_exp": "Qwen4ExpForConditionalGeneration",
        "qwen2_5_omni": "Qwen2_5OmniForConditionalGeneration",
        "qwen3_omni_moe": "Qwen3OmniMoeForConditionalGeneration",
    }
)
"""model_type -> what config.json calls the class, which identifies a family as well as its model_type."""
TEXT_ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "qwen3_5_text": "Qwen3_5ForCausalLM",
        "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    }
)
"""The same of models without a tower, which read text only."""

_DTYPES = ("float32", "bfloat16", "float16")


def has_tower(hf_config: Mapping[str, Any]) -> bool:
    """Return True for the config.json of a model that sees, False for one that reads text only."""
    return hf_config.get("model_type") not in TEXT_ARCHITECTURES


def read_hf_config(folder: Path) -> dict[str, Any]:
    """Read a checkpoint folder's config.json, with its model_type. CheckpointError if there is none, or if the family
    is not supported."""
    if folder.is_dir() and not (folder / "config.json").exists():
        raise CheckpointError(f"{folder} has no config.json: it is not a checkpoint")
    hf_config = read_json(folder, "config.json")
    model_type, architectures = hf_config.get("model_type"), hf_config.get("architectures") or []
    families = {**ARCHITECTURES, **TEXT_ARCHITECTURES}
    for family, architecture in families.items():
        if model_type in (family, f"{family}_thinker") or (model_type is None and architecture in architectures):
            return _thinker({**hf_config, "model_type": family})
    raise CheckpointError(
        f"{folder}: model_type {model_type!r} (architectures {architectures}) is not supported; supported are "
        f"{', '.join(families)}"
    )


def _thinker(hf_config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of an Omni model's config.json that is about the thinker, which reads and writes, in the form of
    other families. `audio_config` moves into `vision_config`, as both describe encoders. Others stay as they are."""
    thinker = hf_config.get("thinker_config", hf_config)
    audio = thinker.get("audio_config")
    if not isinstance(audio, dict):
        return hf_config
    ids = {name.replace("_index", "_id"): value for name, value in thinker.items() if name.endswith("_token_index")}
    shared = {
        name: value for name, value in hf_config.items() if name in ("model_type", "quantization_config", "dtype")
    }
    vision = {**thinker.get("vision_config", {}), "audio_config": audio}
    return {**thinker, **shared, **ids, "vision_config": vision}


def text_fields(top: Fields) -> Fields:
    """Return the decoder's fields, from `text_config` or from the top."""
    return top.section("text_config") if top.has("text_config") else top


def declared_dtype(hf_config: Mapping[str, Any]) -> torch.dtype:
    """Return the dtype that a checkpoint declares, float32 if it declares none. CheckpointError for other dtypes."""
    import torch

    top = Fields(hf_config, "config.json")
    for fields in (top, text_fields(top)):
        for name in ("dtype", "torch_dtype"):
            if fields.has(name):
                value = fields.string(name).removeprefix("torch.")
                if value not in _DTYPES:
                    raise CheckpointError(f"{fields.where}: {name} is {value!r}; supported are {', '.join(_DTYPES)}")
                return getattr(torch, value)
    return torch.float32
