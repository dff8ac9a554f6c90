"""What a picture costs a tower."""

from __future__ import annotations

from collections.abc import Mapping

from vision.towers.attention import attention_cost
from vision.towers.blocks import VisionTower
from vision.towers.pieces import Kind


def encoding_flops(tower: VisionTower, patches: int) -> float:
    """Floating-point operations for a temporal patch of so many patches: of products with weights, and of attention
    over the whole of it. What windows attend to, norms and rotations are small beside these and left out.

    The tower may be on the meta device.
    """
    return _products(tower, patches) + 4.0 * _full_layers(tower) * _width(tower) * patches**2


def encoding_cost(tower: VisionTower, patches: int) -> Mapping[Kind, float]:
    """Costs of all pieces together, as `VisionTower.steps` tells them, for a temporal patch of so many patches; small
    windows at its edges count as whole ones, and preparing values is left out."""
    full, width = _full_layers(tower), _width(tower)
    attention = full * attention_cost(patches, patches, width)
    windowed = len(tower.blocks) - full
    if windowed:
        attention += windowed * attention_cost(patches, min(patches, tower.window_patches), width)
    return {Kind.PRODUCT: _products(tower, patches), Kind.ATTENTION: attention}


def _products(tower: VisionTower, patches: int) -> float:
    layers = tower.patch_embed.flops + sum(block.flops for block in tower.layers())
    return layers * patches + sum(merger.flops for merger in tower.mergers()) * patches / tower.spatial_merge_size**2


def _full_layers(tower: VisionTower) -> int:
    return len(tower.blocks) if tower.num_full_attention is None else tower.num_full_attention


def _width(tower: VisionTower) -> int:
    """Of all heads together."""
    return tower.patch_embed.width
