"""Qwen3-VL's tower: learned positions, interpolated to the grid, and DeepStack embeddings from inner layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from vision.towers.blocks import NORM_EPS, PatchMerger, TowerConfig, VisionMLP, VisionTower, product_flops
from vision.towers.grids import Grid, LayerInputs, interpolation
from vision.towers.pieces import Kind, Piece, PieceLimits, Steps, even_tiles
from vlmserve_common.checkpoint.fields import Fields
from vlmserve_common.compute.activations import activation
from vlmserve_common.compute.layers import Embedding, LayerNorm
from vlmserve_common.compute.linear import Linear
from vlmserve_common.compute.transfers import to_device
from vlmserve_common.errors import CheckpointError

# Patches whose position embeddings are summed together on a CPU: four rows in float32 for each.
_POSITION_ROWS = 512


class Qwen3PatchMerger(PatchMerger):
    """Normalises tokens before they are joined, or after that (DeepStack)."""

    def __init__(self, config: TowerConfig, *, norm_joined: bool) -> None:
        super().__init__(config)
        self._norm_joined = norm_joined
        self.norm = LayerNorm(self._merged_size if norm_joined else config.size, NORM_EPS)
        self.linear_fc1 = Linear(self._merged_size, self._merged_size, bias=True)
        self.linear_fc2 = Linear(self._merged_size, config.out_size, bias=True)
        self._act = activation("gelu")
        self.flops = product_flops(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [P, size] -> [P / merge**2, out_size]."""
        if self._norm_joined:
            x = self.norm(x.view(-1, self._merged_size))
        else:
            x = self.norm(x).view(-1, self._merged_size)
        return self.linear_fc2(self.linear_fc1(x, self._act))


class Qwen3VisionTower(VisionTower):
    """Qwen3-VL's tower, with uninitialised weights, from a `vision_config`."""

    merger_list_name: ClassVar[str] = "deepstack_merger_list"
    make_merger: ClassVar[Callable[..., PatchMerger]] = Qwen3PatchMerger

    def __init__(self, vision_config: dict[str, Any]) -> None:
        fields = Fields(vision_config, "vision_config")
        config = TowerConfig.from_fields(fields)
        act = activation(fields.string("hidden_act", "gelu_pytorch_tanh"))
        inner = fields.positive("intermediate_size")
        positions = fields.positive("num_position_embeddings")
        side, taps = math.isqrt(positions), fields.integers("deepstack_visual_indexes", ())
        if side**2 != positions:
            raise CheckpointError(f"vision_config: num_position_embeddings is {positions}, and must be a square")
        if list(taps) != sorted({tap for tap in taps if 0 <= tap < config.depth}):
            raise CheckpointError(
                f"vision_config: deepstack_visual_indexes is {list(taps)}, and must be ascending layers "
                f"below {config.depth}"
            )

        def norm() -> LayerNorm:
            return LayerNorm(config.size, NORM_EPS)

        def mlp() -> VisionMLP:
            return VisionMLP(("linear_fc1", "linear_fc2"), (config.size, inner, config.size), act)

        make_merger = type(self).make_merger
        super().__init__(config, norm, mlp, make_merger(config, norm_joined=False), embed_bias=True)
        self._side, self._taps = side, taps
        self.num_deepstack_layers = len(taps)
        self.pos_embed = Embedding(positions, config.size)
        self.add_module(self.merger_list_name, nn.ModuleList(make_merger(config, norm_joined=True) for _ in taps))

    def mergers(self) -> list[PatchMerger]:
        return [self.merger, *self._deepstack_mergers()]

    def _deepstack_mergers(self) -> list[PatchMerger]:
        found = self.get_submodule(self.merger_list_name).children()
        return [merger for merger in found if isinstance(merger, PatchMerger)]

    def token_steps(
        self, pixel_values: torch.Tensor, grid_thw: Sequence[Grid], limits: PieceLimits, kept: torch.Tensor | None
    ) -> Steps[torch.Tensor]:
        """Embed the patches and add their positions."""
        x = yield from self.patch_embed.steps(pixel_values, limits)
        yield from self._add_positions(x, grid_thw, kept)
        return x

    def layer_steps(self, inputs: LayerInputs, limits: PieceLimits) -> Steps[torch.Tensor]:
        """Run the layers. DeepStack embeddings follow the main ones in layer order."""
        x, (frames,) = inputs.x, inputs.segments
        out = x.new_empty(len(x) // self.spatial_merge_size**2, 1 + len(self._taps), self.out_hidden_size)
        for index, block in enumerate(self.layers()):
            yield from block.steps(x, inputs.rotary, frames, limits)
            if index in self._taps:
                place = self._taps.index(index)
                yield from self._deepstack_mergers()[place].steps(x, limits, out[:, 1 + place])
        yield from self.merger.steps(x, limits, out[:, 0])
        return out.flatten(1)

    def _add_positions(self, x: torch.Tensor, grids: Sequence[Grid], kept: torch.Tensor | None) -> Steps[None]:
        """Add interpolated position embeddings, summed in float32 and in the dtype of x, to x [P, size]."""
        taps, weights = (
            to_device(part, x.device) for part in interpolation(grids, self.spatial_merge_size, self._side, kept)
        )
        for rows in even_tiles(len(x), _POSITION_ROWS if x.is_cpu else len(x)):
            yield Piece(Kind.ELEMENTS, 4.0 * x[rows].numel())
            x[rows] += (self.pos_embed(taps[rows]) * weights[rows, :, None]).sum(1).to(x.dtype)
