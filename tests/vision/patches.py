"""Random temporal patches for a tower."""

from __future__ import annotations

from functools import partial

import numpy as np

from processors.level_scale import LevelScale
from vision.blocks import VisionTower
from vision.temporal_patch import TemporalPatch

# of one window and several, square, wide and tall; the same grid twice
GRIDS = [(2, 2), (8, 8), (6, 10), (4, 26), (8, 8), (18, 2)]


def random_patches(tower: VisionTower, grids: list[tuple[int, int]] = GRIDS, seed: int = 0) -> list[TemporalPatch]:
    """Patches of some grids, as wide as the tower wants them: in turn values, and levels of two frames and of one."""
    width = tower.patch_embed.proj.weight.shape[1]
    makers = (make_patch, partial(_levels, frames=2), partial(_levels, frames=1))
    return [makers[number % 3](grid, width, seed=seed + number) for number, grid in enumerate(grids)]


def _levels(grid: tuple[int, int], width: int, *, seed: int, frames: int) -> TemporalPatch:
    levels = np.random.default_rng(seed).integers(0, 256, (grid[0] * grid[1], width * frames // 2), dtype=np.uint8)
    scale = LevelScale(mean=(120.0, 110.0, 100.0), std=(70.0, 60.0, 50.0), repeat=2 // frames)
    return TemporalPatch(digest=seed.to_bytes(32, "little"), grid=grid, pixels=levels, scale=scale)


def make_patch(grid: tuple[int, int], width: int, *, seed: int = 0) -> TemporalPatch:
    """A patch of normal noise."""
    pixels = np.random.default_rng(seed).normal(size=(grid[0] * grid[1], width)).astype(np.float32)
    return TemporalPatch(digest=seed.to_bytes(32, "little"), grid=grid, pixels=pixels)
