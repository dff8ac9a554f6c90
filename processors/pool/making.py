"""From the bytes of files to patches: the half of the work that costs CPU time, and that a malicious file can break."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from PIL import Image

from processors.families.base import MultimodalProcessor, ProcessedImage
from processors.image.decoding import DecodeLimits, decode_image
from processors.knobs import ImageKnobs
from processors.video.clips import ProcessedVideo
from processors.video.options import VideoKnobs
from vlmserve_common.errors import BadRequestError


class FatalMediumError(BadRequestError):
    """A medium made the process crash that decoded it: it is not to be tried again."""


class MediaMaker(Protocol):
    """Decodes, resizes and cuts files. Thread-safe; each call blocks, and raises BadRequestError for a bad file."""

    def picture(self, data: bytes, knobs: ImageKnobs) -> ProcessedImage:
        """A picture file."""

    def clip(self, data: bytes, knobs: VideoKnobs) -> ProcessedVideo:
        """A video file."""

    def frames(self, files: Sequence[bytes], knobs: VideoKnobs) -> ProcessedVideo:
        """A video's frames, each a picture file."""

    def close(self) -> None:
        """Let go of what it has. Calls under way, and later ones, may fail with status 503."""


class DirectMaker:
    """See `MediaMaker`: in the calling thread."""

    def __init__(self, processor: MultimodalProcessor) -> None:
        self._processor = processor

    def picture(self, data: bytes, knobs: ImageKnobs) -> ProcessedImage:
        return self._processor.process_image(decode_image(data, self._processor.limits.decode), knobs)

    def clip(self, data: bytes, knobs: VideoKnobs) -> ProcessedVideo:
        return self._processor.process_video(data, knobs)

    def frames(self, files: Sequence[bytes | Image.Image], knobs: VideoKnobs) -> ProcessedVideo:
        """Pillow pictures may stand among the files."""
        return self._processor.process_frames(_decoded(files, self._processor.limits.decode), len(files), knobs)

    def close(self) -> None:
        pass


def closing_error() -> BadRequestError:
    """What a request gets that comes too late."""
    return BadRequestError("the server is shutting down", code="shutting_down", status=503)


def _decoded(frames: Sequence[bytes | Image.Image], limits: DecodeLimits) -> Iterator[Image.Image]:
    """One at a time: memory never holds them all at full size."""
    for place, frame in enumerate(frames):
        try:
            yield decode_image(frame, limits) if isinstance(frame, bytes) else frame
        except BadRequestError as error:
            what = f"frame {place} of the video: {error.message}"
            raise BadRequestError(what, code=error.code, status=error.status) from error
