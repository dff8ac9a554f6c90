"""Model family -> tower."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from vision.towers.blocks import VisionTower
from vision.towers.qwen2 import Qwen2VisionTower
from vision.towers.qwen2_5 import Qwen2_5VisionTower
from vision.towers.qwen3 import Qwen3VisionTower
from vlmserve_common.compute.linear import share_workspace
from vlmserve_common.compute.tensors import give_memory
from vlmserve_common.errors import CheckpointError

TOWERS: Mapping[str, type[Qwen2VisionTower] | type[Qwen2_5VisionTower] | type[Qwen3VisionTower]] = MappingProxyType(
    {
        "qwen2_vl": Qwen2VisionTower,
        "qwen2_5_vl": Qwen2_5VisionTower,
        "qwen3_vl": Qwen3VisionTower,
        "qwen3_vl_moe": Qwen3VisionTower,
        "qwen3_5": Qwen3VisionTower,
        "qwen3_5_moe": Qwen3VisionTower,
    }
)


def make_tower(hf_config: Mapping[str, Any], dtype: torch.dtype, device: torch.device | str) -> VisionTower:
    """An uninitialised tower for a checkpoint's config.json.

    Raises CheckpointError for a family without a tower here, or an impossible `vision_config`.
    """
    model_type = str(hf_config.get("model_type"))
    if model_type not in TOWERS:
        raise CheckpointError(f"no vision tower for model_type {model_type!r}; there are {', '.join(TOWERS)}")
    vision_config = hf_config.get("vision_config")
    if not isinstance(vision_config, dict):
        raise CheckpointError("config.json has no vision_config")
    with torch.device("meta"):
        tower = TOWERS[model_type](vision_config).to(dtype)
    give_memory(tower.eval(), device)
    share_workspace(tower)
    return tower
