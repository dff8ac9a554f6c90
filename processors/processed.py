"""Pictures and videos as patches, ready for the vision tower. Needs no torch: processes tell each other of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from processors.hashing import digest_fields
from processors.inputs import Normalization, Resizing
from processors.knobs import Clamp


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessedImage:
    """One picture, ready for the vision tower.

    digest, patch_digests, grid_thw, feature, normalization, resizing, encoded: as in `MultimodalDataItem`; feature is
    read-only, for requests may share it.
    num_tokens: pad tokens it takes in a prompt. source_size: (width, height) of the upright picture as it came.
    clamps: what the server's limits changed of its knobs; ignored: knobs without effect.
    """

    digest: bytes
    patch_digests: tuple[bytes, ...]
    grid_thw: tuple[int, int, int]
    feature: np.ndarray
    num_tokens: int
    source_size: tuple[int, int]
    normalization: Normalization | None = None
    resizing: Resizing | None = None
    clamps: tuple[Clamp, ...] = ()
    ignored: tuple[str, ...] = ()
    encoded: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessedVideo:
    """One clip, ready for the vision tower.

    digest, patch_digests, grid_thw, feature, normalization, resizing, second_per_grid_t: as in `MultimodalDataItem`;
    feature is read-only.
    num_tokens: pad tokens in a prompt. source_size: (width, height) of an upright frame as it came. frame_indices,
    frame_times: the frames used, by number and in seconds. patch_times: the mean time of each temporal patch.
    source_fps, source_frames: frames a second and in all, as it came. sampling: the rule that chose frames; sample_fps:
    how many of them a second. clamps: what the server's limits changed of its knobs; ignored: knobs without effect.
    """

    digest: bytes
    patch_digests: tuple[bytes, ...]
    grid_thw: tuple[int, int, int]
    feature: np.ndarray
    num_tokens: int
    source_size: tuple[int, int]
    frame_indices: tuple[int, ...]
    frame_times: tuple[float, ...]
    patch_times: tuple[float, ...]
    second_per_grid_t: float
    source_fps: int | float  # as it was given
    source_frames: int
    sampling: str
    sample_fps: int | float
    normalization: Normalization | None = None
    resizing: Resizing | None = None
    clamps: tuple[Clamp, ...] = ()
    ignored: tuple[str, ...] = ()


ProcessedMedium: TypeAlias = ProcessedImage | ProcessedVideo


def of_tenant(medium: ProcessedMedium, tenant: str) -> ProcessedMedium:
    """The same medium under digests that are nobody else's, so that no cache finds it for others."""

    def own(digest: bytes) -> bytes:
        return digest_fields([b"vlmserve tenant 1", tenant.encode(), digest])

    return replace(medium, digest=own(medium.digest), patch_digests=tuple(map(own, medium.patch_digests)))
