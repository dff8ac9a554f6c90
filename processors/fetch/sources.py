"""The first step of a medium: fetch the bytes that its request names, or pass on the object that came with it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeVar

from PIL import Image

from processors.fetch.fetching import MediaFetcher, MediaFile
from processors.fetch.limits import Claim
from processors.inputs import Modality
from vlmserve_common.errors import BadRequestError

FetchedFrame: TypeAlias = bytes | Image.Image
Frame: TypeAlias = str | MediaFile | FetchedFrame

_AtHand = TypeVar("_AtHand")
# A list of JPEG frames in one URL, base64 each, with commas between them, as vLLM takes it.
_JPEG_FRAMES = re.compile(r"data:video/jpeg;base64,", re.IGNORECASE)


async def file_from(
    source: str | bytes | MediaFile | _AtHand, fetcher: MediaFetcher, claim: Claim, modality: Modality = Modality.IMAGE
) -> bytes | _AtHand:
    """Return the bytes of a URL or file, and anything else unchanged. Raises BadRequestError."""
    return (
        await fetcher.fetch(source, modality=modality, claim=claim) if isinstance(source, str | MediaFile) else source
    )


class VideoSources:
    """Fetches videos. `max_frames`: most frames in a list. `at_a_time`: frames of one list fetched at the same time."""

    def __init__(self, fetcher: MediaFetcher, *, max_frames: int, at_a_time: int) -> None:
        self._fetcher = fetcher
        self._max_frames = max_frames
        self._at_a_time = at_a_time

    async def fetch(
        self, source: str | bytes | MediaFile | Sequence[Frame], claim: Claim, *, limited: bool = True
    ) -> bytes | tuple[FetchedFrame, ...]:
        """Return a clip's bytes, or the frames of a list. limited: these are frames, and not an H.264 stream of which a
        few are used. Raises BadRequestError."""
        if isinstance(source, bytes):
            return source
        if isinstance(source, str) and (match := _JPEG_FRAMES.match(source)):
            # One part more than there may be tells enough: millions of commas would be gigabytes of parts.
            parts = source[match.end() :].split(",", self._max_frames)
            source = tuple(f"data:image/jpeg;base64,{part}" for part in parts)
        if isinstance(source, str | MediaFile):
            return await self._fetcher.fetch(source, modality=Modality.VIDEO, claim=claim)
        if limited and len(source) > self._max_frames:
            what = f"the list of frames has {len(source)} frames; the limit is {self._max_frames}"
            raise BadRequestError(f"{what} (setting --max-video-frames)", code="too_many_frames")
        return await self._fetch_list(source, claim)

    async def _fetch_list(self, frames: Sequence[Frame], claim: Claim) -> tuple[FetchedFrame, ...]:
        """Return the frames in order. Together they may be no larger than a video. If several fail, the first one's
        error is raised."""
        limit = self._fetcher.settings.limit(Modality.VIDEO)
        claim.whole = limit.bytes
        turns, total = asyncio.Semaphore(self._at_a_time), 0

        async def fetch(place: int, frame: Frame) -> FetchedFrame:
            nonlocal total
            try:
                async with turns:
                    fetched = await file_from(frame, self._fetcher, claim)
                total += len(fetched) if isinstance(fetched, bytes) else 0
                if total > limit.bytes:
                    for task in tasks:
                        task.cancel()
                await claim.take(total)
                return fetched
            except BaseException:
                for later in tasks[place + 1 :]:
                    later.cancel()
                raise

        tasks = [asyncio.create_task(fetch(place, frame)) for place, frame in enumerate(frames)]
        try:
            return tuple([await task for task in tasks])
        except asyncio.CancelledError:
            if total <= limit.bytes:
                raise
            what = f"the frames are larger together than {limit.bytes} bytes (setting {limit.setting})"
            raise BadRequestError(what, code="invalid_media_url") from None
        finally:
            await call_off(tasks)


async def call_off(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel unfinished tasks, and return when all have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
