"""Segments as the attention kernel for GPUs takes them: tiles of queries, in a tensor of constant length."""

from __future__ import annotations

import torch

from vision.towers.grids import Segments
from vision.towers.layer_inputs import StaticSegments
from vlmserve_common.compute.rotary import Rotation
from vlmserve_common.kernels.gpu.segments import segment_attention, tile_rows, turn

# Tiles of a bucket: one for so many patches. Windows of 64 patches need one each, and up to four times as many where
# a picture is narrower than they are. A tile that is not needed does nothing.
_PATCHES_OF_A_TILE = 16


class TiledSegments(StaticSegments):
    """See the module docstring. patches: of the bucket. longest: patches of a segment, at the most."""

    def __init__(self, patches: int, longest: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._rows = tile_rows(dtype, longest)
        self._tiles = torch.zeros(-(-patches // _PATCHES_OF_A_TILE), 3, dtype=torch.int32, device=device)

    def fits(self, segments: Segments) -> bool:
        """See the base class."""
        return sum(-(-length // self._rows) for length in segments.lengths) <= len(self._tiles)

    def load(self, segments: Segments) -> None:
        """See the base class. Nobody waits for the copy."""
        tiles = segments.tiles(self._rows)
        self._tiles[: len(tiles)].copy_(tiles)
        self._tiles[len(tiles) :].zero_()

    def attend(self, qkv: torch.Tensor, rotary: Rotation) -> torch.Tensor:
        """See the base class. Queries and keys are turned in place."""
        turn(qkv, *rotary)
        return segment_attention(qkv, self._tiles, self._rows)
