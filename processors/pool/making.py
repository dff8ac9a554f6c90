"""From the bytes of files to patches, where they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from PIL import Image

from processors.families.base import MultimodalProcessor, ProcessedImage
from processors.image.decoding import DecodeLimits, decode_image
from processors.knobs import ImageKnobs
from processors.video.clips import ProcessedVideo
from processors.video.options import VideoKnobs
from vlmserve_common.errors import BadRequestError


class DirectMaker:
    """As `MediaMaker`, in the calling thread."""

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


def _decoded(frames: Sequence[bytes | Image.Image], limits: DecodeLimits) -> Iterator[Image.Image]:
    """One at a time: memory never holds them all at full size."""
    for place, frame in enumerate(frames):
        try:
            yield decode_image(frame, limits) if isinstance(frame, bytes) else frame
        except BadRequestError as error:
            what = f"frame {place} of the video: {error.message}"
            raise BadRequestError(what, code=error.code, status=error.status) from error
