"""Frozen data that the processors hand to the engine. `vlmserve_common.transport.wire` can encode it."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

import numpy as np

from vlmserve_common.transport.held import HeldArray


class Modality(enum.StrEnum):
    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"


@dataclass(frozen=True, kw_only=True, slots=True)
class Normalization:
    """How uint8 pixels become a tower's values: (pixel - mean) / std in float32, per channel, on the scale 0 to 255.

    `repeat`: how many times a patch shows its only frame (for a picture); else 1.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    repeat: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Resizing:
    """How decoded frames become patches on the tower's device: resized to their grid, then cut.

    `mode`: one of `processors.resize.RESAMPLING`. `patch_size`, `merge_size`: as in `processors.resize.PatchConfig`.
    """

    mode: str
    patch_size: int
    merge_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MultimodalDataItem:
    """One picture or one video of a request, one sound, or the last part of a sound.

    `digest`: 32 bytes, BLAKE3 over modality, grid and patch_digests (length-framed), which cannot be forged.
    `patch_digests`: one for each temporal patch (a picture is one), over its pixels, grid and cutting; the embedding
    cache goes by them. For what came as embeddings: over the rows. `grid_thw`: patches in time, height and
    width, before the spatial merge. `offsets`: half-open ranges [start, end) of this item's pad tokens in the expanded
    `input_ids`. A picture has one range, a Qwen3-VL video one for each temporal patch. Their lengths sum to t*h*w /
    merge_size**2, less what is left out. `feature`: uint8 [t*h*w, in_channels * frames * patch_size**2], pixels in the
    family's patch order.
    frames is 1 for a picture, else temporal_patch_size. `normalization`: how pixels become values (see
    `processors.normalize`). `resizing`: set if frames are not resized and cut yet; feature is then uint8 [t*frames,
    height, width, 3]. `encoded`: it came as embeddings: feature is float32 [num_tokens, width], without
    normalization. `second_per_grid_t`: seconds between temporal patches (Qwen2.5-VL video), else 0.

    Two fields say what is left out (see `processors.pruning`). `kept`: for each temporal patch a byte for each of its
    places: BEFORE, STAYS or BEHIND. feature lacks the patches of places that leave before the tower. () if all stay.
    `counts`: how many tokens of each temporal patch stay, which are chosen from its embeddings; () for all of them.
    `parts`: of a medium that is held for many requests, its feature in pieces of as many temporal patches each;
    `feature` is then empty.
    `gone`: temporal patches of the video that have left before its first one, where what stays keeps its positions.
    `skipped`: positions before the video that what has left had.

    A sound has a temporal patch for each part that its tower attends within. Its `feature` is float32 [frames, mels],
    log-mel, with as many frames for each part. Its grid has the area of its tokens: (parts, merge_size * tokens of a
    part, merge_size).
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
    kept: tuple[bytes, ...] = ()
    counts: tuple[int, ...] = ()
    parts: tuple[HeldArray, ...] = ()
    gone: int = 0
    skipped: int = 0

    @property
    def num_tokens(self) -> int:
        """Pad tokens of this item in the prompt."""
        return sum(end - start for start, end in self.offsets)

    @property
    def num_patches(self) -> int:
        """Vision patches that a tower encodes; 0 if the item came encoded."""
        if self.encoded:
            return 0
        total, places = math.prod(self.grid_thw), sum(map(len, self.kept))
        return total - total // places * sum(part.count(0) for part in self.kept) if places else total

    @property
    def patch_tokens(self) -> tuple[int, ...]:
        """Pad tokens of each temporal patch."""
        if self.kept:
            return tuple(part.count(1) for part in self.kept)
        number = len(self.patch_digests)
        return self.counts or (self.num_tokens // number,) * number

    @property
    def patch_keys(self) -> list[tuple[bytes, str, tuple[int, int, int], float]]:
        """The identities of its temporal patches for prefix reuse. Items that begin with equal keys have equal
        embeddings and equal relative positions there. Where something is left out, all of the item counts."""
        if self.kept or self.counts:
            whole = (self.digest, self.modality.value, self.grid_thw, self.second_per_grid_t)
            return [whole] * len(self.patch_digests)
        grid = (1, *self.grid_thw[1:])
        return [(digest, self.modality.value, grid, self.second_per_grid_t) for digest in self.patch_digests]


@dataclass(frozen=True, kw_only=True, slots=True)
class MultimodalInputs:
    """A request's media, in prompt order, and the M-RoPE positions of its whole prompt.

    `mrope_positions`: int64 [3, L] (time, height, width) for the L tokens of the expanded prompt.
    `mrope_position_delta`: a generated token with index i (counted from the prompt's start) has position i + delta.
    """

    items: tuple[MultimodalDataItem, ...]
    mrope_positions: np.ndarray
    mrope_position_delta: int
