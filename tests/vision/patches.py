"""Random temporal patches for a tower, those of media, and their rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from processors.families.base import ProcessedMedium, data_item
from processors.inputs import Normalization
from vision.towers.blocks import VisionTower
from vision.towers.runner import pixel_values
from vision.towers.temporal_patch import TemporalPatch, temporal_patches

# of one window and several, square, wide and tall; the same grid twice
SCALE = Normalization(mean=(120.0, 110.0, 100.0), std=(70.0, 60.0, 50.0))
GRIDS = [(2, 2), (8, 8), (6, 10), (4, 26), (8, 8), (18, 2)]


def random_patches(tower: VisionTower, grids: list[tuple[int, int]] = GRIDS, seed: int = 0) -> list[TemporalPatch]:
    """Patches of some grids, as wide as the tower wants them: of two frames, of one, and normalized otherwise."""
    width = tower.patch_embed.proj.weight.shape[1]
    other = Normalization(mean=(127.5,) * 3, std=(127.5,) * 3)
    kinds = ({}, {"frames": 1}, {"normalization": other})
    return [make_levels(grid, width, seed=seed + number, **kinds[number % 3]) for number, grid in enumerate(grids)]


def make_levels(
    grid: tuple[int, int], width: int, *, seed: int = 0, frames: int = 2, normalization: Normalization = SCALE
) -> TemporalPatch:
    """A patch of noise, of `width` values."""
    levels = np.random.default_rng(seed).integers(0, 256, (grid[0] * grid[1], width * frames // 2), dtype=np.uint8)
    levels.flags.writeable = False  # as those of media
    normalization = replace(normalization, repeat=2 // frames)
    return TemporalPatch(digest=seed.to_bytes(32, "little"), grid=grid, pixels=levels, normalization=normalization)


def make_patch(grid: tuple[int, int], width: int, *, seed: int = 0) -> TemporalPatch:
    """A patch of normal noise, for workers without a tower."""
    pixels = np.random.default_rng(seed).normal(size=(grid[0] * grid[1], width)).astype(np.float32)
    return TemporalPatch(digest=seed.to_bytes(32, "little"), grid=grid, pixels=pixels)


def patches_of(medium: ProcessedMedium) -> tuple[TemporalPatch, ...]:
    """A medium's temporal patches."""
    return temporal_patches(data_item(medium))


@torch.inference_mode()
def directly(tower: VisionTower, patches: list[TemporalPatch]) -> torch.Tensor:
    """The rows of temporal patches of one grid, as a video's, by a call of the tower."""
    return tower(pixel_values(patches, torch.device("cpu")), [(len(patches), *patches[0].grid)])
