"""Pictures, videos and sounds, ready for a tower. Needs no torch, since processes exchange these."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import numpy as np

from processors.hashing import digest_fields
from processors.inputs import Normalization, Resizing
from processors.knobs import Clamp
from processors.pruning import NOTHING_LEAVES, Pruning
from vlmserve_common.transport.held import HeldArray


@dataclass(frozen=True, kw_only=True, slots=True)
class _Processed:
    """The common part of all media.

    `digest`, `patch_digests`, `grid_thw`, `feature`, `normalization`, `resizing`: as in `MultimodalDataItem`. Requests
    may share `feature`, so it is read-only. `num_tokens`: pad tokens in a prompt. `source_size`: (width, height) of the
    upright original picture or frame. `clamps`: knobs that server limits changed. `ignored`: knobs without effect.
    `encoded`, `kept`, `counts`, `parts`: as in `MultimodalDataItem`. `pruning`: what was asked to leave it.
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
    kept: tuple[bytes, ...] = ()
    counts: tuple[int, ...] = ()
    pruning: Pruning = NOTHING_LEAVES
    parts: tuple[HeldArray, ...] = ()

    @property
    def patch_tokens(self) -> tuple[int, ...]:
        """Pad tokens of each temporal patch."""
        if self.kept:
            return tuple(part.count(1) for part in self.kept)
        return self.counts or (self.num_tokens // self.grid_thw[0],) * self.grid_thw[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessedImage(_Processed):
    """One picture, ready for the vision tower."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessedAudio(_Processed):
    """One sound, ready for the audio tower. `source_size` is (0, 0).

    `feature`: log-mel, float32 [frames, mels]. `patch_digests`: of each part that the tower attends within.
    `part_frames`, `part_tokens`: of a whole part; the last part may have less. `source_rate`, `channels`: of the file.
    `seconds`: of the part that is heard.
    """

    part_frames: int
    part_tokens: int
    source_rate: int
    channels: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessedVideo(_Processed):
    """One clip, ready for the vision tower.

    `frame_indices`, `frame_times`: the frames used, by number and in seconds; none if it came encoded. `patch_times`:
    the mean time of each temporal patch. `second_per_grid_t`: as in `MultimodalDataItem`. `source_fps`,
    `source_frames`: of the original. `sampling`: the rule that chose the frames. `sample_fps`: frames used per second.
    `probes`, `scene_changes`, `nearest`, `fallback`: as in `FrameChoice`. `sound`: the clip's sound, if the model hears
    it. `gone`, `skipped`: as in `MultimodalDataItem`.
    """

    frame_indices: tuple[int, ...]
    frame_times: tuple[float, ...]
    patch_times: tuple[float, ...]
    second_per_grid_t: float
    source_fps: int | float  # as it was given
    source_frames: int
    sampling: str
    sample_fps: int | float
    probes: int = 0
    scene_changes: tuple[float, ...] = ()
    nearest: tuple[float, ...] = ()
    fallback: str = ""
    sound: ProcessedAudio | None = None
    gone: int = 0
    skipped: int = 0


ProcessedMedium: TypeAlias = ProcessedImage | ProcessedVideo | ProcessedAudio


def features_of(medium: ProcessedMedium) -> list[np.ndarray]:
    """Return the arrays of a medium: its own, and that of a clip's sound."""
    sound = medium.sound if isinstance(medium, ProcessedVideo) else None
    return [medium.feature] if sound is None else [medium.feature, sound.feature]


def nbytes_of(medium: ProcessedMedium) -> int:
    """Return the memory of a medium, and of a clip's sound, in bytes."""
    return sum(array.nbytes for array in features_of(medium)) + sum(part.nbytes for part in medium.parts)


_Medium = TypeVar("_Medium", bound=ProcessedMedium)


def held(medium: _Medium) -> _Medium:
    """Return the medium for many requests, which then name its patches, and do not bring them. A sound stays as it
    is."""
    if medium.encoded or medium.parts or isinstance(medium, ProcessedAudio):
        return medium
    feature = medium.feature
    empty = np.empty((0, *feature.shape[1:]), feature.dtype)
    return replace(medium, feature=empty, parts=(HeldArray(feature),))


def of_tenant(medium: ProcessedMedium, tenant: str) -> ProcessedMedium:
    """Return the medium under digests of this tenant alone, so that no cache finds it for another tenant."""

    def own(digest: bytes) -> bytes:
        return digest_fields([b"vlmserve tenant 1", tenant.encode(), digest])

    if isinstance(medium, ProcessedVideo) and medium.sound is not None:
        sound = of_tenant(medium.sound, tenant)
        assert isinstance(sound, ProcessedAudio)
        medium = replace(medium, sound=sound)
    return replace(medium, digest=own(medium.digest), patch_digests=tuple(map(own, medium.patch_digests)))
