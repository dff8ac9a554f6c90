"""Loads the vision tower of a checkpoint, without the rest of the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from vision.towers.blocks import VisionTower
from vision.towers.registry import make_tower
from vlmserve_common.checkpoint.hf_config import declared_dtype, read_hf_config
from vlmserve_common.checkpoint.reader import CheckpointReader
from vlmserve_common.checkpoint.weights import WeightRules, load_weights
from vlmserve_common.compute.tensors import give_memory
from vlmserve_common.errors import CheckpointError

TOWER_WEIGHT_RULES = WeightRules(
    # `visual.*` (Qwen2-VL, Qwen2.5-VL) or `model.visual.*` (Qwen3-VL, and all families saved anew)
    prefixes=(("model.visual.", "visual."),),
    # a constant that old versions of transformers saved along
    ignored=(r"\brotary_pos_emb\.inv_freq$",),
)
"""How a tower's tensors are named in a whole model's checkpoint."""

OF_THE_TOWER = r"^(model\.)?visual\."
_NOT_OF_THE_TOWER = r"^(?!(model\.)?visual\.)"


def outline_tower(folder: Path, *, dtype: torch.dtype | None = None) -> VisionTower:
    """The tower of a checkpoint folder without its weights, on the meta device: its sizes, and no memory.

    dtype, errors: those of `load_tower`, but for the tensors'.
    """
    hf_config = read_hf_config(folder)
    try:
        dtype = dtype or declared_dtype(hf_config)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    return make_tower(hf_config, dtype, "meta")


def load_tower(folder: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> VisionTower:
    """Make the tower of a checkpoint folder on `device`; only its tensors are read.

    dtype: what it computes in; the checkpoint's own by default. Raises CheckpointError when the family is unknown, the
    `vision_config` impossible, or one of the tower's tensors missing, unexpected or misshaped.
    """
    reader = CheckpointReader(folder)
    tower = outline_tower(folder, dtype=dtype)
    give_memory(tower, device)
    rules = replace(TOWER_WEIGHT_RULES, ignored=(*TOWER_WEIGHT_RULES.ignored, _NOT_OF_THE_TOWER))
    # under the name that it has in a whole model: only what is stored under that name is meant for it
    load_weights(nn.ModuleDict({"visual": tower}), reader, rules)
    return tower
