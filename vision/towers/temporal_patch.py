"""Temporal patches: the unit in which pictures and videos are encoded and cached."""

from __future__ import annotations

from dataclasses import dataclass

import blake3
import numpy as np

from processors.inputs import MultimodalDataItem, Normalization, Resizing


@dataclass(frozen=True, kw_only=True, slots=True)
class TemporalPatch:
    """A picture, or one temporal patch of a video. Towers encode these and caches hold their embeddings.

    Attention, windows, position embeddings and DeepStack never cross a temporal patch. So a video's embeddings are
    those of its temporal patches, one after the other.

    `digest`: 32 bytes over its pixels, grid and patch settings. `grid`: (height, width) in patches. `pixels`: uint8 [h
    * w, pixels of a patch], in the processor's patch order; `normalization` turns them into values. With a `resizing`
    they are uint8 [frames, height, width, 3], which it turns into such patches. `encoded`: it came as embeddings:
    pixels are the embeddings, without a normalization.
    """

    digest: bytes
    grid: tuple[int, int]
    pixels: np.ndarray
    normalization: Normalization | None = None
    resizing: Resizing | None = None
    encoded: bool = False

    @property
    def num_patches(self) -> int:
        return 0 if self.encoded else self.grid[0] * self.grid[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeBatch:
    """A batch for one call of the tower. `number`: unique among batches. `patches`: at least one."""

    number: int
    patches: tuple[TemporalPatch, ...]


def temporal_patches(item: MultimodalDataItem) -> tuple[TemporalPatch, ...]:
    """Return a picture's single temporal patch, or a video's in order. Their pixels are views of the item's."""
    parts = np.split(item.feature, len(item.patch_digests))
    return tuple(
        TemporalPatch(
            digest=digest,
            grid=item.grid_thw[1:],
            pixels=part,
            normalization=item.normalization,
            resizing=item.resizing,
            encoded=item.encoded,
        )
        for digest, part in zip(item.patch_digests, parts, strict=True)
    )


def embedding_key(fingerprint: bytes, patch: TemporalPatch) -> bytes:
    """Return 32 bytes that identify a temporal patch's embeddings: its tower (`loading.tower_fingerprint`) and its
    content."""
    return blake3.blake3(fingerprint + patch.digest).digest()
