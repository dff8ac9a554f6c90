"""The first step of a medium: what its request names becomes bytes, or is at hand as it is. Blocking."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from processors.fetch.fetching import MediaFetcher
from processors.fetch.frame_lists import FetchedFrame, Frame, FrameLists
from processors.fetch.media_file import MediaFile
from processors.inputs import Modality

_AtHand = TypeVar("_AtHand")
# A list of JPEG frames in one URL, base64 each, with commas between them, as vLLM takes it.
_JPEG_FRAMES = re.compile(r"data:video/jpeg;base64,", re.IGNORECASE)


def file_from(source: str | bytes | MediaFile | _AtHand, fetcher: MediaFetcher, modality: Modality) -> bytes | _AtHand:
    """The bytes of a URL or a file; anything else is at hand. Raises BadRequestError."""
    return fetcher.fetch(source, modality=modality) if isinstance(source, str | MediaFile) else source


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoSources:
    """max_frames: most in a list of frames. frames_at_a_time: of a list's frames that are fetched side by side."""

    max_frames: int
    frames_at_a_time: int

    def fetch(
        self, source: str | bytes | MediaFile | Sequence[Frame], fetcher: MediaFetcher, param: str | None
    ) -> bytes | tuple[FetchedFrame, ...]:
        """A clip's bytes, or a list's frames. Raises BadRequestError."""
        if isinstance(source, str) and (match := _JPEG_FRAMES.match(source)):
            # One part more than there may be tells enough: millions of commas would be gigabytes of parts.
            parts = source[match.end() :].split(",", self.max_frames)
            source = tuple(f"data:image/jpeg;base64,{part}" for part in parts)
        if isinstance(source, str | bytes | MediaFile):
            return file_from(source, fetcher, Modality.VIDEO)
        lists = FrameLists(fetcher, max_frames=self.max_frames, at_a_time=self.frames_at_a_time)
        return lists.fetch(source, param)
