"""The grain at which pictures and videos are encoded and cached."""

from __future__ import annotations

from dataclasses import dataclass

import blake3
import numpy as np

from processors.inputs import MultimodalDataItem, Normalization, Resizing


@dataclass(frozen=True, kw_only=True, slots=True)
class TemporalPatch:
    """What towers encode and caches hold: a picture, or one temporal patch of a video.

    Attention, windows, position embeddings and DeepStack never cross a temporal patch, so a video's embeddings are
    those of its temporal patches, one after the other.

    digest: 32 bytes over its pixels, grid and patch settings. grid: (height, width) in patches. pixels: uint8 [h * w,
    pixels of a patch], in the processor's patch order, which `normalization` makes values of; with a `resizing` uint8
    [frames, height, width, 3], which that makes such patches of. encoded: it came encoded, and pixels are its
    embeddings, without a normalization.
    """

    digest: bytes
    grid: tuple[int, int]
    pixels: np.ndarray
    normalization: Normalization | None = None
    resizing: Resizing | None = None
    encoded: bool = False

    @property
    def num_patches(self) -> int:
        """Patches to encode."""
        return 0 if self.encoded else self.grid[0] * self.grid[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeBatch:
    """number: unlike that of any other batch. patches: one at least, encoded in one call."""

    number: int
    patches: tuple[TemporalPatch, ...]


def temporal_patches(item: MultimodalDataItem) -> tuple[TemporalPatch, ...]:
    """A picture's one, or a video's in order; their pixels are views of the item's."""
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
    """32 bytes that stand for a temporal patch's embeddings: what made them (`towers.fingerprint`), and of what."""
    return blake3.blake3(fingerprint + patch.digest).digest()
