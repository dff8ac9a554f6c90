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
    }
)
"""model_type -> what config.json calls the class, which identifies a family as well as its model_type."""
TEXT_ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
)
"""The same of models without a tower, which may guess for others."""

_DTYPES = ("float32", "bfloat16", "float16")


def read_hf_config(folder: Path, *, text_only: bool = False) -> dict[str, Any]:
    """Read a checkpoint folder's config.json, with its model_type. CheckpointError if there is none, or if the family
    is not supported. text_only: models without a tower are supported, too."""
    if folder.is_dir() and not (folder / "config.json").exists():
        raise CheckpointError(f"{folder} has no config.json: it is not a checkpoint")
    hf_config = read_json(folder, "config.json")
    model_type, architectures = hf_config.get("model_type"), hf_config.get("architectures") or []
    families = {**ARCHITECTURES, **TEXT_ARCHITECTURES} if text_only else ARCHITECTURES
    for family, architecture in families.items():
        if model_type == family or (model_type is None and architecture in architectures):
            return {**hf_config, "model_type": family}
    raise CheckpointError(
        f"{folder}: model_type {model_type!r} (architectures {architectures}) is not supported; supported are "
        f"{', '.join(families)}"
    )


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
