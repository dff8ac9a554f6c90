"""What the processors hand to the engine: frozen, and encodable by `vlmserve_common.transport.wire`."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np


class Modality(enum.StrEnum):
    IMAGE = "image"
    VIDEO = "video"


@dataclass(frozen=True, kw_only=True, slots=True)
class Normalization:
    """uint8 pixels to a tower's values: (pixel - mean) / std in float32, each channel with its own, 0 to 255.

    repeat: how many times a patch shows its frame, where it has only one (a picture's); else 1.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    repeat: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Resizing:
    """How frames that come as they were decoded become patches where the tower is: resized to their grid, then cut.

    mode: of `processors.resize.RESAMPLING`. patch_size, merge_size: as in `processors.resize.PatchConfig`.
    """

    mode: str
    patch_size: int
    merge_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MultimodalDataItem:
    """One picture or one video of a request.

    digest: 32 bytes, BLAKE3 over modality, grid and patch_digests (length-framed): not forgeable.
    patch_digests: of each temporal patch (a picture is one), over its pixels, grid and cutting: what embeddings are
        known by. Of a picture that came encoded: over its rows.
    grid_thw: patches in time, height and width, before the spatial merge.
    offsets: half-open ranges [start, end) of this item's pad tokens in the expanded `input_ids`; one range for a
        picture (one per temporal patch in a Qwen3-VL video). Their lengths sum to t*h*w / merge_size**2.
    feature: uint8 [t*h*w, in_channels * frames * patch_size**2], pixels in the family's patch order; frames is 1 for a
        picture, else temporal_patch_size. normalization: makes values of them (see `processors.normalize`).
    resizing: where frames are yet to be resized and cut; feature is then uint8 [t*frames, height, width, 3].
    encoded: it came encoded: feature is its embeds, float32 [num_tokens, width], and has no normalization.
    second_per_grid_t: seconds between temporal patches (Qwen2.5-VL video), else 0.
    """

    modality: Modality
    digest: bytes
    patch_digests: tuple[bytes, ...]
    grid_thw: tuple[int, int, int]
    offsets: tuple[tuple[int, int], ...]
    feature: np.ndarray
    normalization: Normalization | None = None
    resizing: Resizing | None = None
    encoded: bool = False
    second_per_grid_t: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Pad tokens of this item in the prompt."""
        return sum(end - start for start, end in self.offsets)

    @property
    def media_key(self) -> tuple[bytes, str, tuple[int, int, int], float]:
        """The identity that prefix reuse goes by: equal keys mean equal embeddings and equal relative positions."""
        return (self.digest, self.modality.value, self.grid_thw, self.second_per_grid_t)


@dataclass(frozen=True, kw_only=True, slots=True)
class MultimodalInputs:
    """A request's media, in prompt order, and the M-RoPE positions of its whole prompt.

    mrope_positions: int64 [3, L] (time, height, width) for the L expanded prompt tokens.
    mrope_position_delta: a generated token with index i (counted from the prompt's start) sits at i + delta.
    """

    items: tuple[MultimodalDataItem, ...]
    mrope_positions: np.ndarray
    mrope_position_delta: int
