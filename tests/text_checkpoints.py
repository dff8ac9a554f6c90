"""Tiny checkpoints of models that read text only: the decoders of `tiny_checkpoints`."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file

from tests.tiny_checkpoints import make_checkpoint, write_safetensors
from vlmserve_common.checkpoint.hf_config import TEXT_ARCHITECTURES

# each family, and whose decoder it has
FAMILIES = {
    "qwen2": "qwen2_5_vl",
    "qwen3": "qwen3_vl",
    "qwen3_moe": "qwen3_vl_moe",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5_moe",
}
_PREFIXES = ("model.language_model.", "model.", "lm_head.")
# as published ones: contents are texts, not parts
_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def make_text_checkpoint(family: str, folder: Path, *, seed: int = 0) -> Path:
    """Write a checkpoint of one of FAMILIES into `folder` and return it."""
    return without_tower(make_checkpoint(FAMILIES[family], folder, seed=seed, deepstack=(), experts="each"), family)


def without_tower(folder: Path, family: str = "qwen3") -> Path:
    """Make a checkpoint's decoder a model of its own, in place."""
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    text.pop("vision_config", None)
    rope = text.get("rope_parameters", text.pop("rope_scaling", {}))
    for name in ("mrope_section", "mrope_interleaved"):
        rope.pop(name, None)
    text |= {"model_type": family, "architectures": [TEXT_ARCHITECTURES[family]]}
    text["tie_word_embeddings"] = config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(text))
    for file in folder.glob("*preprocessor_config.json"):
        file.unlink()
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    told = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name.startswith(_PREFIXES) and not name.startswith("model.visual."):
            tensors[name.replace("model.language_model.", "model.")] = tensor
    write_safetensors(folder, tensors)
    return folder
