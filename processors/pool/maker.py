"""From the bytes of files to patches: the half of the work that costs CPU time, and that a malicious file can break."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from processors.knobs import ImageKnobs
from processors.processed import ProcessedImage, ProcessedVideo
from processors.video.options import VideoKnobs
from vlmserve_common.errors import BadRequestError


class FatalMediumError(BadRequestError):
    """A medium made the process that decoded it crash or overrun its limits: it is not to be tried again."""


class MediaMaker(Protocol):
    """Decodes, resizes and cuts files. Raises BadRequestError for a bad file. Cancelling a call ends its work.

    client: whose work it is; clients take turns.
    """

    async def picture(self, data: bytes, knobs: ImageKnobs, *, client: str = "") -> ProcessedImage:
        """A picture file."""

    async def clip(self, data: bytes, knobs: VideoKnobs, *, client: str = "") -> ProcessedVideo:
        """A video file."""

    async def frames(self, files: Sequence[bytes], knobs: VideoKnobs, *, client: str = "") -> ProcessedVideo:
        """A video's frames, each a picture file."""

    async def close(self) -> None:
        """Let go of what it has. Calls under way, and later ones, fail with status 503."""


def closing_error() -> BadRequestError:
    """What a request gets that comes too late."""
    return BadRequestError("the server is shutting down", code="shutting_down", status=503)
