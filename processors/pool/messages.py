"""Messages between a media worker and its keeper. Large arrays go through shared memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from processors.knobs import ImageKnobs
from processors.processed import ProcessedImage, ProcessedVideo
from processors.video.options import VideoKnobs


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureWork:
    """A picture to process. `data`: the file's bytes, uint8."""

    data: np.ndarray
    knobs: ImageKnobs


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoWork:
    """A video to process.

    `data`: the file's bytes, uint8. With `sizes`, it is the bytes of the frames, picture files of these sizes in a row.
    """

    data: np.ndarray
    knobs: VideoKnobs
    sizes: tuple[int, ...] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkBegun:
    """The worker has the medium and starts to decode it. If it dies after this, the medium may be the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkRefused:
    """The medium is bad: a BadRequestError's fields. `out_of_memory`: the worker can no longer be used."""

    message: str
    code: str | None
    status: int
    out_of_memory: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkFailed:
    """The worker failed through a fault of its own."""

    message: str


MediaWork = PictureWork | VideoWork
WORK_MESSAGES = (PictureWork, VideoWork)
ANSWER_MESSAGES = (WorkBegun, WorkRefused, WorkFailed, ProcessedImage, ProcessedVideo)
