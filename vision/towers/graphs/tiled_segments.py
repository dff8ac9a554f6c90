"""Segments as the attention kernel for GPUs takes them: tiles of queries, in a tensor of constant length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from vlmserve_common.kernels.gpu.segments import segment_attention, tile_rows, turn

from vision.towers.layer_inputs import StaticSegments
from vlmserve_common.compute.rotary import Rotation

# Tiles of a bucket: one for so many patches. Windows of 64 patches need one each, and up to four times as many where
# a picture is narrower than they are. A tile that is not needed does nothing.
_PATCHES_OF_A_TILE = 16


class TiledSegments(StaticSegments):
    """See the module docstring. patches: of the bucket. longest: patches of a segment, at the most."""

    def __init__(self, patches: int, longest: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self._rows = tile_rows(dtype, longest)
        self._tiles = torch.zeros(-(-patches // _PATCHES_OF_A_TILE), 3, dtype=torch.int32, device=device)

    def fits(self, lengths: Sequence[int]) -> bool:
        """See the base class."""
        return sum(-(-length // self._rows) for length in lengths) <= len(self._tiles)

    def load(self, lengths: Sequence[int]) -> None:
        """See the base class. Nobody waits for the copy."""
        tiles = np.zeros(self._tiles.shape, dtype=np.int32)
        counts = -(-np.array(lengths) // self._rows)
        ends = np.cumsum(lengths)
        begins = ends - lengths
        among = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        rows = np.repeat(begins, counts) + among * self._rows
        tiles[: len(rows)] = np.stack((np.repeat(begins, counts), np.repeat(ends, counts), rows), axis=1)
        host = torch.from_numpy(tiles)
        self._tiles.copy_(host.pin_memory() if self._tiles.is_cuda else host, non_blocking=True)

    def attend(self, qkv: torch.Tensor, rotary: Rotation) -> torch.Tensor:
        """See the base class. Queries and keys are turned in place."""
        turn(qkv, *rotary)
        return segment_attention(qkv, self._tiles, self._rows)
