"""What a tower's layers compute from: pixels and grids, read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from vision.towers.grids import Segments
from vlmserve_common.compute.rotary import Rotation


class StaticSegments(ABC):
    """Segments in memory that a captured graph reads: other ones in every replay. Patches behind the last are padding,
    and what becomes of them is nobody's."""

    @abstractmethod
    def fits(self, segments: Segments) -> bool:
        """Whether there is room for so many of such lengths."""

    @abstractmethod
    def load(self, segments: Segments) -> None:
        """Have these from now on, which fit."""

    @abstractmethod
    def attend(self, qkv: torch.Tensor, rotary: Rotation) -> torch.Tensor:
        """As `segment_attention`, in launches that depend on no length."""


@dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """x: [P, size], embedded patches, which may be overwritten. rotary: float32 [P, 1, head_dim] each. segments: whole
    frames, and windows where the tower has these. order: int64 [P / merge**2], the place of each embedding; None: they
    are in order."""

    x: torch.Tensor
    rotary: Rotation
    segments: tuple[Segments | StaticSegments, ...]
    order: torch.Tensor | None = None
