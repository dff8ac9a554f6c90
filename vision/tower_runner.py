"""Runs a tower on its device: packed temporal patches in, rows out. Keeps nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vision.blocks import VisionTower
from vision.temporal_patch import TemporalPatch


class TowerRunner:
    """A tower and the device that it is on."""

    def __init__(self, tower: VisionTower, device: torch.device) -> None:
        self._tower = tower
        self._device = device

    def encode(self, patches: Sequence[TemporalPatch]) -> tuple[torch.Tensor, ...]:
        """Rows of each temporal patch [h * w / merge**2, row width] in the tower's dtype, from one call of the tower.

        Each has memory of its own, so that dropping one frees it. ValueError for pixels and grids that do not fit.
        """
        pixels, grids = pack(patches)
        packed = self.encode_packed(torch.from_numpy(pixels), grids)
        if len(patches) == 1:
            return (packed,)
        return tuple(rows.clone() for rows in packed.split(self.row_counts(grids)))

    @torch.inference_mode()
    def encode_packed(self, pixels: torch.Tensor, grids: Sequence[tuple[int, int]]) -> torch.Tensor:
        """pixels float32 [P, patch elements] of temporal patches one behind the other, grids (height, width) of each ->
        all their rows [P / merge**2, row width] on the tower's device. See `VisionTower.forward` for errors."""
        return self._tower(pixels.to(self._device), [(1, h, w) for h, w in grids])

    def row_counts(self, grids: Sequence[tuple[int, int]]) -> list[int]:
        """How many rows temporal patches have."""
        return [h * w // self._tower.spatial_merge_size**2 for h, w in grids]


def pack(patches: Sequence[TemporalPatch]) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """The pixels of temporal patches (one at least) in one new array, and their grids. ValueError for pixels that
    are not those of their grid, or not as wide as the others'."""
    for patch in patches:
        h, w = patch.grid
        if len(patch.pixels) != h * w:
            raise ValueError(f"a temporal patch of grid {patch.grid} has {h * w} patches, not {len(patch.pixels)}")
    return np.concatenate([patch.pixels for patch in patches]), [patch.grid for patch in patches]
