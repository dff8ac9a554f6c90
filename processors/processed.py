"""Pictures and videos as patches, ready for the vision tower. Needs no torch, since processes exchange these."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from processors.hashing import digest_fields
from processors.inputs import Normalization, Resizing
from processors.knobs import Clamp


@dataclass(frozen=True, kw_only=True, slots=True)
class _Processed:
    """The common part of pictures and clips.

    `digest`, `patch_digests`, `grid_thw`, `feature`, `normalization`, `resizing`: as in `MultimodalDataItem`. Requests
    may share `feature`, so it is read-only. `num_tokens`: pad tokens in a prompt. `source_size`: (width, height) of the
    upright original picture or frame. `clamps`: knobs that server limits changed. `ignored`: knobs without effect.
    `encoded`: as in `MultimodalDataItem`.
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
class ProcessedImage(_Processed):
    """One picture, ready for the vision tower."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessedVideo(_Processed):
    """One clip, ready for the vision tower.

    `frame_indices`, `frame_times`: the frames used, by number and in seconds; none if it came encoded. `patch_times`:
    the mean time of each temporal patch. `second_per_grid_t`: as in `MultimodalDataItem`. `source_fps`,
    `source_frames`: of the original. `sampling`: the rule that chose the frames. `sample_fps`: frames used per second.
    """

    frame_indices: tuple[int, ...]
    frame_times: tuple[float, ...]
    patch_times: tuple[float, ...]
    second_per_grid_t: float
    source_fps: int | float  # as it was given
    source_frames: int
    sampling: str
    sample_fps: int | float


ProcessedMedium: TypeAlias = ProcessedImage | ProcessedVideo


def of_tenant(medium: ProcessedMedium, tenant: str) -> ProcessedMedium:
    """Return the medium under digests of this tenant alone, so that no cache finds it for another tenant."""

    def own(digest: bytes) -> bytes:
        return digest_fields([b"vlmserve tenant 1", tenant.encode(), digest])

    return replace(medium, digest=own(medium.digest), patch_digests=tuple(map(own, medium.patch_digests)))
