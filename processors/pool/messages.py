"""What a media worker and its keeper say to each other. Large arrays go through shared memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from processors.knobs import ImageKnobs
from processors.processed import ProcessedImage, ProcessedVideo
from processors.video.options import VideoKnobs


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureWork:
    """data: a picture file's bytes, uint8."""

    data: np.ndarray
    knobs: ImageKnobs


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoWork:
    """data: a video file's bytes, uint8; or those of its frames, picture files, one behind the other, where `sizes`
    says how many bytes each has."""

    data: np.ndarray
    knobs: VideoKnobs
    sizes: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkBegun:
    """The worker has the medium and goes on to decode it: if it dies from here on, the medium may be the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkRefused:
    """The medium is bad: a BadRequestError's fields. out_of_memory: the worker is of no more use."""

    message: str
    code: str | None
    status: int
    out_of_memory: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkFailed:
    """The worker failed on its own account."""

    message: str


MediaWork = PictureWork | VideoWork
WORK_MESSAGES = (PictureWork, VideoWork)
ANSWER_MESSAGES = (WorkBegun, WorkRefused, WorkFailed, ProcessedImage, ProcessedVideo)
