"""A video that grows at its end and loses its beginning: temporal patches joined, as if all came as one clip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from processors.hashing import media_digest
from processors.inputs import Modality
from processors.processed import ProcessedVideo, held

RULE = "live"
"""The `sampling` of a live video."""


def live_patch(video: ProcessedVideo, times: Sequence[float], second_per_grid_t: float) -> ProcessedVideo:
    """Return the temporal patch of a few frames as the beginning of a live video. times: of the frames, in seconds.

    second_per_grid_t: seconds between temporal patches.
    """
    times = tuple(times)
    return replace(
        held(video),
        frame_indices=(),
        frame_times=times,
        # as `VideoProcessor` does for a whole clip
        patch_times=((times[0] + times[-1]) / 2,),
        second_per_grid_t=second_per_grid_t,
        source_frames=len(times),
        sampling=RULE,
    )


def joined(video: ProcessedVideo, more: ProcessedVideo) -> ProcessedVideo:
    """Return a live video with more temporal patches behind it. Its seconds between patches hold for all. Raises
    ValueError for patches of another size."""
    if video.grid_thw[1:] != more.grid_thw[1:]:
        raise ValueError(f"temporal patches of {video.grid_thw[1:]} and {more.grid_thw[1:]} are not of one video")
    return _of(
        video,
        (*video.patch_digests, *more.patch_digests),
        parts=(*video.parts, *more.parts),
        frame_times=(*video.frame_times, *more.frame_times),
        patch_times=(*video.patch_times, *more.patch_times),
        source_frames=video.source_frames + more.source_frames,
    )


def without_first(video: ProcessedVideo, count: int) -> ProcessedVideo:
    """Return a live video without its first `count` temporal patches, of which it has more."""
    each = len(video.frame_times) // len(video.patch_times)
    return _of(
        video,
        video.patch_digests[count:],
        parts=video.parts[count:],
        frame_times=video.frame_times[count * each :],
        patch_times=video.patch_times[count:],
        source_frames=video.source_frames - count * each,
    )


def _of(video: ProcessedVideo, digests: tuple[bytes, ...], **fields: Any) -> ProcessedVideo:
    grid = (len(digests), *video.grid_thw[1:])
    return replace(
        video,
        digest=media_digest(Modality.VIDEO, grid, digests),
        patch_digests=digests,
        grid_thw=grid,
        num_tokens=video.num_tokens // video.grid_thw[0] * len(digests),
        **fields,
    )
