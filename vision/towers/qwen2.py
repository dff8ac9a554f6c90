"""The towers of Qwen2-VL and Qwen2.5-VL.

Qwen2-VL has LayerNorm blocks, and full attention in every temporal patch. Qwen2.5-VL has RMSNorm and gated MLPs; most
layers attend to windows, a few to the whole temporal patch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vision.towers.blocks import NORM_EPS, QwenPatchMerger, TowerConfig, VisionMLP, VisionTower
from vision.towers.grids import Grid, LayerInputs, Segments, frame_lengths, patch_coordinates, window_order
from vision.towers.pieces import PieceLimits, Steps
from vlmserve_common.checkpoint.fields import Fields
from vlmserve_common.compute.activations import activation
from vlmserve_common.compute.layers import GatedMLP, LayerNorm, RMSNorm
from vlmserve_common.compute.transfers import to_device
from vlmserve_common.errors import CheckpointError


class Qwen2VisionTower(VisionTower):
    """Qwen2-VL's tower, with uninitialised weights, from a `vision_config`."""

    def __init__(self, vision_config: dict[str, Any]) -> None:
        fields = Fields(vision_config, "vision_config")
        # `hidden_size` is the decoder's width in this family, `embed_dim` the tower's
        config = TowerConfig.from_fields(fields, size_field="embed_dim", out_size_field="hidden_size")
        act = activation(fields.string("hidden_act", "quick_gelu"))
        inner = int(config.size * fields.number("mlp_ratio", 4.0))

        def norm() -> LayerNorm:
            return LayerNorm(config.size, NORM_EPS)

        def mlp() -> VisionMLP:
            return VisionMLP(("fc1", "fc2"), (config.size, inner, config.size), act)

        super().__init__(config, norm, mlp, QwenPatchMerger(config, norm()))


class Qwen2_5VisionTower(VisionTower):
    """Qwen2.5-VL's tower, with uninitialised weights, from a `vision_config`."""

    def __init__(self, vision_config: dict[str, Any]) -> None:
        fields = Fields(vision_config, "vision_config")
        config = TowerConfig.from_fields(fields)
        act = activation(fields.string("hidden_act", "silu"))
        inner = fields.positive("intermediate_size")
        window_pixels = fields.positive("window_size", 112)
        window = window_pixels // config.merge_size // config.kernel[-1]
        if window < 1:
            raise CheckpointError(f"vision_config: window_size {window_pixels} is less than one merged patch")

        def norm() -> RMSNorm:
            return RMSNorm(config.size, NORM_EPS)

        def mlp() -> GatedMLP:
            return GatedMLP(config.size, inner, act, bias=True)

        super().__init__(config, norm, mlp, QwenPatchMerger(config, norm()))
        self.full_attention = frozenset(fields.integers("fullatt_block_indexes", (7, 15, 23, 31)))
        self.window_patches = (config.merge_size * window) ** 2
        self._window = window

    def input_steps(
        self, pixel_values: torch.Tensor, grid_thw: Sequence[Grid], limits: PieceLimits, kept: torch.Tensor | None
    ) -> Steps[LayerInputs]:
        """Prepare the inputs. Between the first and the last layer, patches go window by window."""
        merge = self.spatial_merge_size
        order, window_lengths = window_order(grid_thw, merge, self._window, kept)
        patch_order = (order[:, None] * merge**2 + torch.arange(merge**2)).view(-1)
        x = yield from self.patch_embed.steps(pixel_values, limits)
        device = x.device
        return LayerInputs(
            x=x[to_device(patch_order, device)],
            rotary=self.rotary(patch_coordinates(grid_thw, merge, kept)[:, patch_order], device),
            # a frame's windows stay inside it, so frames are contiguous in either order
            segments=(Segments(frame_lengths(grid_thw, kept), device), Segments(window_lengths, device)),
            order=to_device(order, device),
        )
