"""The grain at which pictures and videos are encoded and cached."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True, slots=True)
class TemporalPatch:
    """What towers encode and caches hold: a picture, or one temporal patch of a video.

    digest: 32 bytes over its pixels, grid and patch settings. grid: (height, width) in patches. pixels: float32
    [h * w, patch elements], in the processor's patch order.
    """

    digest: bytes
    grid: tuple[int, int]
    pixels: np.ndarray
