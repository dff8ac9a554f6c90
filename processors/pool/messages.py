"""Messages between a media worker and its keeper. Large arrays go through shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from processors.audio.options import AudioKnobs
from processors.inputs import Modality
from processors.knobs import ImageKnobs
from processors.pool.maker import MediaWork
from processors.processed import ProcessedAudio, ProcessedImage, ProcessedVideo
from processors.video.adaptive import FirstLook
from processors.video.options import VideoKnobs


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkOrder:
    """A `MediaWork` as a message. `data`: the bytes of its files in a row, uint8. `sizes`: of each file.

    `image_knobs`, `video_knobs`, `audio_knobs`: all but one are None. `looks`: the clip is only to be looked at.
    """

    data: np.ndarray
    sizes: tuple[int, ...]
    image_knobs: ImageKnobs | None
    video_knobs: VideoKnobs | None
    listed: bool
    audio_knobs: AudioKnobs | None = None
    looks: bool = False

    @classmethod
    def of(cls, work: MediaWork, *, looks: bool = False) -> WorkOrder:
        files, knobs = [file for file in work.files if isinstance(file, bytes)], work.knobs
        return cls(
            data=np.frombuffer(b"".join(files), np.uint8),
            sizes=tuple(map(len, files)),
            image_knobs=knobs if isinstance(knobs, ImageKnobs) else None,
            video_knobs=knobs if isinstance(knobs, VideoKnobs) else None,
            audio_knobs=knobs if isinstance(knobs, AudioKnobs) else None,
            listed=work.listed,
            looks=looks,
        )

    def work(self) -> MediaWork:
        knobs = self.image_knobs or self.video_knobs or self.audio_knobs
        assert knobs is not None
        data, ends = self.data.tobytes(), np.cumsum((0, *self.sizes)).tolist()
        files = [data[start:end] for start, end in pairwise(ends)]
        return MediaWork(files=files, knobs=knobs, listed=self.listed)

    @property
    def modality(self) -> Modality:
        if self.audio_knobs is not None:
            return Modality.AUDIO
        return Modality.IMAGE if self.video_knobs is None else Modality.VIDEO

    @property
    def what(self) -> str:
        """The medium's name in errors."""
        return {Modality.IMAGE: "picture", Modality.VIDEO: "video", Modality.AUDIO: "sound"}[self.modality]


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


WORK_MESSAGES = (WorkOrder,)
ANSWER_MESSAGES = (WorkBegun, WorkRefused, WorkFailed, ProcessedImage, ProcessedVideo, ProcessedAudio, FirstLook)
