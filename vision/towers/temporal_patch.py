"""Temporal patches: the unit in which pictures, videos and sounds are encoded and cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import blake3
import numpy as np

from processors.inputs import Modality, MultimodalDataItem, Normalization, Resizing
from vlmserve_common.checkpoint.adapter_ref import AdapterRef
from vlmserve_common.transport.held import HeldArray


@dataclass(frozen=True, kw_only=True, slots=True)
class TemporalPatch:
    """A picture, or one temporal patch of a video. Towers encode these and caches hold their embeddings.

    Attention, windows, position embeddings and DeepStack never cross a temporal patch. So a video's embeddings are
    those of its temporal patches, one after the other.

    `digest`: 32 bytes over its pixels, grid and patch settings. `grid`: (height, width) in patches. `pixels`: uint8 [h
    * w, pixels of a patch], in the processor's patch order; `normalization` turns them into values. With a `resizing`
    they are uint8 [frames, height, width, 3], which it turns into such patches. `encoded`: it came as embeddings:
    pixels are the embeddings, without a normalization. `adapter`: what changes the tower that encodes it, if anything.
    `kept`: a byte for each place of the grid (merge x merge patches), 1 if it is encoded; then pixels has the patches
    of these places only. Empty if all are. `held`: where the pixels are until they are needed: an array, the first
    of its rows, and the one behind the last; `pixels` is empty until then. `sound`: it is a part of a sound: pixels
    are log-mel frames float32 [frames, mels], and the grid's area gives the number of its embeddings.
    """

    digest: bytes
    grid: tuple[int, int]
    pixels: np.ndarray
    normalization: Normalization | None = None
    resizing: Resizing | None = None
    encoded: bool = False
    adapter: AdapterRef | None = None
    kept: bytes = b""
    held: tuple[HeldArray, int, int] | None = None
    sound: bool = False

    @property
    def num_patches(self) -> int:
        """Patches that a tower encodes."""
        total = 0 if self.encoded else self.grid[0] * self.grid[1]
        return total // len(self.kept) * self.kept.count(1) if self.kept else total

    def rows(self, merge: int) -> int:
        """Return how many embeddings it has. merge: patches a side that become one."""
        return self.kept.count(1) if self.kept else self.grid[0] * self.grid[1] // merge**2

    def with_pixels(self) -> TemporalPatch:
        """Return it with its pixels. If those are gone, there are none, and it cannot be encoded."""
        if self.held is None:
            return self
        array, start, end = self.held
        return replace(self, pixels=array.array[start:end], held=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeBatch:
    """A batch for one call of the tower. `number`: unique among batches. `patches`: at least one, of one adapter."""

    number: int
    patches: tuple[TemporalPatch, ...]


def temporal_patches(item: MultimodalDataItem, adapter: AdapterRef | None = None) -> tuple[TemporalPatch, ...]:
    """Return a picture's single temporal patch, or those of a video or sound in order. Their pixels are views of the
    item's. adapter: the request's, which counts if it changes the tower."""
    count = len(item.patch_digests)
    shares = [len(kept) - kept.count(0) for kept in item.kept] or [1] * count  # of the rows
    masks = [kept.replace(b"\2", b"\1") if 0 in kept else b"" for kept in item.kept] or [b""] * count
    pixels, held = [item.feature] * count, list[tuple[HeldArray, int, int] | None]([None] * count)
    if item.parts:
        each = count // len(item.parts)  # temporal patches of a part
        held = [
            (part, start, end)
            for number, part in enumerate(item.parts)
            for start, end in _rows(part.shape[0], shares[number * each : (number + 1) * each])
        ]
    else:
        pixels = [item.feature[start:end] for start, end in _rows(len(item.feature), shares)]
    return tuple(
        TemporalPatch(
            digest=digest,
            grid=item.grid_thw[1:],
            pixels=part,
            normalization=item.normalization,
            resizing=item.resizing,
            encoded=item.encoded,
            sound=item.modality is Modality.AUDIO,
            adapter=None if adapter is None or item.encoded or not adapter.tower else adapter,
            kept=kept,
            held=place,
        )
        for digest, part, kept, place in zip(item.patch_digests, pixels, masks, held, strict=True)
    )


def _rows(rows: int, shares: Sequence[int]) -> list[tuple[int, int]]:
    """Cut rows into ranges of these shares."""
    ends = [0, *accumulate(shares)]
    return [(rows * start // max(1, ends[-1]), rows * end // max(1, ends[-1])) for start, end in pairwise(ends)]


def embedding_key(fingerprint: bytes, patch: TemporalPatch) -> bytes:
    """Return 32 bytes that identify a temporal patch's embeddings: its tower (`loading.tower_fingerprint`), its
    adapter, and its content."""
    adapter = b"" if patch.adapter is None else patch.adapter.digest.encode()
    return blake3.blake3(fingerprint + patch.digest + adapter).digest()
