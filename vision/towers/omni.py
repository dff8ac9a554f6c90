"""The vision towers of Qwen2.5-Omni and Qwen3-Omni: those of Qwen2.5-VL and Qwen3-VL under other names."""

from __future__ import annotations

from typing import Any

import torch

from vision.towers.blocks import NORM_EPS, QwenPatchMerger, TowerConfig
from vision.towers.qwen2 import Qwen2_5VisionTower
from vision.towers.qwen3 import Qwen3VisionTower
from vlmserve_common.compute.layers import LayerNorm
from vlmserve_common.compute.linear import MergedLinear


class Qwen2_5OmniVisionTower(Qwen2_5VisionTower):
    """Qwen2.5-Omni's tower, with uninitialised weights, from a `vision_config`. Queries, keys and values are stored
    apart."""

    def __init__(self, vision_config: dict[str, Any]) -> None:
        super().__init__(vision_config)
        for block in self.layers():
            size = self.patch_embed.width
            block.attn.qkv = MergedLinear(size, dict.fromkeys("qkv", size), bias=True)


class OmniPatchMerger(QwenPatchMerger):
    """Normalises tokens before they are joined, or after that (DeepStack)."""

    def __init__(self, config: TowerConfig, *, norm_joined: bool) -> None:
        joined = config.merge_size**2 if norm_joined else 1
        super().__init__(config, LayerNorm(config.size * joined, NORM_EPS))
        self._norm_joined = norm_joined

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [P, size] -> [P / joined, out_size]."""
        return super().forward(x.view(-1, self._merged_size) if self._norm_joined else x)


class Qwen3OmniVisionTower(Qwen3VisionTower):
    """Qwen3-Omni's tower, with uninitialised weights, from a `vision_config`."""

    merger_list_name = "merger_list"
    make_merger = OmniPatchMerger
