"""A clip's frames, one temporal patch after the other, into the array in which they travel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from processors.hashing import original_digest, patch_digest
from processors.resize import PatchConfig, frames_to_patches, planes, resize_frames


class OtherSizeError(Exception):
    """A frame has not the size of those before it, so they cannot travel as they are."""


def cut_frames(
    frames: Iterable[np.ndarray], feature: np.ndarray, grid: tuple[int, int], config: PatchConfig, *, in_float: bool
) -> list[bytes]:
    """Fill feature uint8 [t, h*w, row width] with the patches of frames uint8 [H, W, 3]; the digests.

    The last frame is repeated to fill the last temporal patch. in_float: see `resize_frames`.
    """
    height, width = grid[0] * config.patch_size, grid[1] * config.patch_size
    group = np.empty((config.temporal_patch_size, 3, height, width), np.uint8)
    digests: list[bytes] = []
    resized = _resized(frames, height, width, config.resample, in_float)
    for place in feature:
        for at in range(len(group)):
            # a filled up frame stays as it is from the place before
            group[at] = next(resized, group[at - 1])
        frames_to_patches(group.transpose(0, 2, 3, 1), config, out=place)
        digests.append(patch_digest(grid, group, config))
    return digests


def take_frames(
    frames: Iterable[np.ndarray], feature: np.ndarray, grid: tuple[int, int], config: PatchConfig
) -> list[bytes]:
    """As `cut_frames`, but feature uint8 [t, temporal_patch_size, H, W, 3] gets the frames as they are, to be resized
    later. Raises OtherSizeError."""
    digests: list[bytes] = []
    originals = iter(frames)
    for place in feature:
        for at in range(len(place)):
            frame = next(originals, place[at - 1])
            if frame.shape != place.shape[1:]:
                raise OtherSizeError
            place[at] = frame
        digests.append(original_digest(grid, place, config))
    return digests


def _resized(frames: Iterable[np.ndarray], height: int, width: int, mode: str, in_float: bool) -> Iterator[np.ndarray]:
    """uint8 [3, height, width] each."""
    for frame in frames:
        yield planes(resize_frames(frame[None], height, width, mode, in_float=in_float))[0]
