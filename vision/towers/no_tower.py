"""What stands for the tower of a model that reads text only."""

from __future__ import annotations

import torch
from torch import nn

from vision.towers.blocks import VisionTower


class NoTower(VisionTower):
    """A tower without weights, which encodes nothing: its embeddings have no elements. dtype: of the model."""

    is_there = False
    spatial_merge_size = 1
    out_hidden_size = 0

    def __init__(self, dtype: torch.dtype) -> None:
        nn.Module.__init__(self)
        self.ears = None
        self._dtype = dtype

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model."""
        return self._dtype
