"""A medium that the server holds itself, such as an uploaded file."""

from __future__ import annotations

from abc import ABC, abstractmethod

from processors.fetch.settings import ByteLimit
from processors.inputs import Modality


class MediaFile(ABC):
    """It may stand where a URL does, and is read when its turn comes, in a thread.

    modality: by the file's first bytes; None where they are of neither a picture nor a video.
    """

    modality: Modality | None

    @abstractmethod
    def read(self, limit: ByteLimit) -> bytes:
        """The whole file. Raises BadRequestError where it is gone or larger than the limit."""
