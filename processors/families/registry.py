"""model_type -> processor class. A family's module is imported when a checkpoint asks for it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from processors.families.base import ContinueText, MultimodalProcessor, ProcessorLimits
from processors.families.config import read_processor_config
from vlmserve_common.errors import CheckpointError

_PROCESSORS: Mapping[str, tuple[str, str]] = {
    "qwen2_vl": ("processors.families.qwen2_vl", "Qwen2VLProcessor"),
    "qwen2_5_vl": ("processors.families.qwen2_5_vl", "Qwen2_5VLProcessor"),
    "qwen3_vl": ("processors.families.qwen3_vl", "Qwen3VLProcessor"),
    "qwen3_vl_moe": ("processors.families.qwen3_vl", "Qwen3VLProcessor"),
    "qwen3_5": ("processors.families.qwen3_vl", "Qwen3VLProcessor"),
    "qwen3_5_moe": ("processors.families.qwen3_vl", "Qwen3VLProcessor"),
}


def make_processor(
    model_path: str | Path,
    hf_config: Mapping[str, Any],
    limits: ProcessorLimits | None = None,
    continue_text: ContinueText | None = None,
) -> MultimodalProcessor:
    """The processor of a checkpoint folder; hf_config is the content of its config.json.

    continue_text: its tokenizer, for videos of families that write the time into the prompt.

    Raises CheckpointError for an unknown model_type or unusable picture settings.
    """
    model_type = hf_config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _PROCESSORS:
        raise CheckpointError(f"model_type {model_type!r} is not supported, only {sorted(_PROCESSORS)}")
    module, name = _PROCESSORS[model_type]
    processor_class: type[MultimodalProcessor] = getattr(importlib.import_module(module), name)
    config = read_processor_config(model_path, hf_config)
    return processor_class(config, limits or ProcessorLimits(), continue_text)
