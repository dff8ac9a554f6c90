"""Qwen2.5-VL's tower: RMSNorm and gated MLPs; windows of attention, and a few layers over the whole temporal patch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from vision.towers.blocks import (
    NORM_EPS,
    AxialRotary,
    PatchEmbed,
    QwenPatchMerger,
    TowerConfig,
    VisionAttention,
    VisionBlock,
    VisionTower,
)
from vision.towers.grids import Grid, LayerInputs, Segments, frame_lengths, patch_coordinates, window_order
from vision.towers.pieces import PieceLimits, Steps
from vlmserve_common.checkpoint.fields import Fields
from vlmserve_common.compute.activations import activation
from vlmserve_common.compute.layers import GatedMLP, RMSNorm
from vlmserve_common.compute.transfers import to_device
from vlmserve_common.errors import CheckpointError


class Qwen2_5VisionTower(VisionTower):
    """Qwen2.5-VL's tower, with uninitialised weights, from a `vision_config`."""

    def __init__(self, vision_config: dict[str, Any]) -> None:
        super().__init__()
        fields = Fields(vision_config, "vision_config")
        config = TowerConfig.from_fields(fields)
        act = activation(fields.string("hidden_act", "silu"))
        inner = fields.positive("intermediate_size")
        window_pixels = fields.positive("window_size", 112)
        self._window = window_pixels // config.merge_size // config.kernel[-1]
        if self._window < 1:
            raise CheckpointError(f"vision_config: window_size {window_pixels} is less than one merged patch")
        self.full_attention = frozenset(fields.integers("fullatt_block_indexes", (7, 15, 23, 31)))
        self.spatial_merge_size = config.merge_size
        self.out_hidden_size = config.out_size
        self.patch_embed = PatchEmbed(config.kernel, config.size, bias=False)
        self.blocks = nn.ModuleList(
            VisionBlock(
                lambda: RMSNorm(config.size, NORM_EPS),
                VisionAttention(config.size, config.num_heads),
                GatedMLP(config.size, inner, act, bias=True),
            )
            for _ in range(config.depth)
        )
        norm, joined = RMSNorm(config.size, NORM_EPS), config.merge_size**2
        self.merger = QwenPatchMerger(norm, config.size, joined, config.out_size, activation("gelu"))
        self.window_patches = joined * self._window**2
        self.rotary = AxialRotary(config.head_dim, config.rope_theta)

    def input_steps(
        self, pixel_values: torch.Tensor, grid_thw: Sequence[Grid], limits: PieceLimits
    ) -> Steps[LayerInputs]:
        """Prepare the inputs. Between the first and the last layer, patches go window by window."""
        merge = self.spatial_merge_size
        order, window_lengths = window_order(grid_thw, merge, self._window)
        patch_order = (order[:, None] * merge**2 + torch.arange(merge**2)).view(-1)
        x = yield from self.patch_embed.steps(pixel_values, limits)
        device = x.device
        return LayerInputs(
            x=x[to_device(patch_order, device)],
            rotary=self.rotary(patch_coordinates(grid_thw, merge)[:, patch_order], device),
            # a frame's windows stay inside it, so frames are contiguous in either order
            segments=(Segments(frame_lengths(grid_thw), device), Segments(window_lengths, device)),
            order=to_device(order, device),
        )
