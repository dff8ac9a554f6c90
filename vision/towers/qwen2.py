"""Qwen2-VL's tower: LayerNorm blocks, full attention in every temporal patch."""

from __future__ import annotations

from typing import Any

from torch import nn

from vision.towers.blocks import (
    NORM_EPS,
    AxialRotary,
    PatchEmbed,
    QwenPatchMerger,
    TowerConfig,
    VisionAttention,
    VisionBlock,
    VisionMLP,
    VisionTower,
)
from vlmserve_common.checkpoint.fields import Fields
from vlmserve_common.compute.activations import activation
from vlmserve_common.compute.layers import LayerNorm


class Qwen2VisionTower(VisionTower):
    """Qwen2-VL's tower, with uninitialised weights, from a `vision_config`."""

    def __init__(self, vision_config: dict[str, Any]) -> None:
        super().__init__()
        fields = Fields(vision_config, "vision_config")
        # `hidden_size` is the decoder's width in this family, `embed_dim` the tower's
        config = TowerConfig.from_fields(fields, size_field="embed_dim", out_size_field="hidden_size")
        act = activation(fields.string("hidden_act", "quick_gelu"))
        inner = int(config.size * fields.number("mlp_ratio", 4.0))
        self.spatial_merge_size = config.merge_size
        self.out_hidden_size = config.out_size
        self.patch_embed = PatchEmbed(config.kernel, config.size, bias=False)
        self.blocks = nn.ModuleList(
            VisionBlock(
                lambda: LayerNorm(config.size, NORM_EPS),
                VisionAttention(config.size, config.num_heads),
                VisionMLP(("fc1", "fc2"), (config.size, inner, config.size), act),
            )
            for _ in range(config.depth)
        )
        norm, joined = LayerNorm(config.size, NORM_EPS), config.merge_size**2
        self.merger = QwenPatchMerger(norm, config.size, joined, config.out_size, activation("gelu"))
        self.rotary = AxialRotary(config.head_dim, config.rope_theta)
