"""Random temporal patches for a tower."""

from __future__ import annotations

import numpy as np

from vision.blocks import VisionTower
from vision.temporal_patch import TemporalPatch

# of one window and several, square, wide and tall; the same grid twice
GRIDS = [(2, 2), (8, 8), (6, 10), (4, 26), (8, 8), (18, 2)]


def random_patches(tower: VisionTower, grids: list[tuple[int, int]] = GRIDS, seed: int = 0) -> list[TemporalPatch]:
    """Patches of some grids, as wide as the tower wants them."""
    width = tower.patch_embed.proj.weight.shape[1]
    return [make_patch(grid, width, seed=seed + number) for number, grid in enumerate(grids)]


def make_patch(grid: tuple[int, int], width: int, *, seed: int = 0) -> TemporalPatch:
    """A patch of normal noise."""
    pixels = np.random.default_rng(seed).normal(size=(grid[0] * grid[1], width)).astype(np.float32)
    return TemporalPatch(digest=seed.to_bytes(32, "little"), grid=grid, pixels=pixels)
