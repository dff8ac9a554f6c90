"""Makes patches from the bytes of files, which costs CPU time, and which a malicious file can break."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Lock
from typing import ParamSpec, Protocol, TypeVar

from PIL import Image

from processors.families.base import MultimodalProcessor, ProcessedImage
from processors.image.decoding import decode_image
from processors.knobs import ImageKnobs
from processors.pool.turns import BYTES_PER_S, Turns
from processors.video.clips import ProcessedVideo
from processors.video.options import VideoKnobs
from vlmserve_common.errors import BadRequestError

_P = ParamSpec("_P")
_T = TypeVar("_T")


class FatalMediumError(BadRequestError):
    """A medium made the process that decoded it crash or exceed its limits. It is not tried again."""


class MediaMaker(Protocol):
    """Decodes, resizes and cuts files. Raises BadRequestError for a bad file. Cancelling a call ends its work.

    `client`: whose work it is; clients take turns.
    """

    async def picture(self, data: bytes, knobs: ImageKnobs, *, client: str = "") -> ProcessedImage:
        """Process a picture file."""

    async def clip(self, data: bytes, knobs: VideoKnobs, *, client: str = "") -> ProcessedVideo:
        """Process a video file."""

    async def frames(self, files: Sequence[bytes], knobs: VideoKnobs, *, client: str = "") -> ProcessedVideo:
        """Process a video's frames, each a picture file."""

    async def close(self) -> None:
        """Free all resources. Calls under way, and later ones, fail with status 503."""


class DirectMaker:
    """Processes media in the calling thread. Thread-safe. Pillow pictures can replace files."""

    def __init__(self, processor: MultimodalProcessor) -> None:
        self._processor = processor
        self._pillow = Lock()

    def picture(self, data: bytes | Image.Image, knobs: ImageKnobs) -> ProcessedImage:
        return self._processor.process_image(self._decoded(data), knobs)

    def clip(self, data: bytes, knobs: VideoKnobs) -> ProcessedVideo:
        return self._processor.process_video(data, knobs)

    def frames(self, files: Sequence[bytes | Image.Image], knobs: VideoKnobs) -> ProcessedVideo:
        return self._processor.process_frames(self._frames(files), len(files), knobs)

    def _frames(self, frames: Sequence[bytes | Image.Image]) -> Iterator[Image.Image]:
        """Decode the frames one at a time, so that memory never holds them all at full size."""
        for place, frame in enumerate(frames):
            try:
                yield self._decoded(frame)
            except BadRequestError as error:
                what = f"frame {place} of the video: {error.message}"
                raise BadRequestError(what, code=error.code, status=error.status) from error

    def _decoded(self, picture: bytes | Image.Image) -> Image.Image:
        if isinstance(picture, bytes):
            return decode_image(picture, self._processor.limits.decode)
        # One may be given twice, and two threads must not load it at once. What goes wrong, the processor meets again.
        with self._pillow, suppress(Exception):
            picture.load()
        return picture


class ThreadMaker:
    """A `MediaMaker` with threads. A thread finishes the work that it has begun, even if the call is cancelled."""

    def __init__(self, processor: MultimodalProcessor, max_workers: int) -> None:
        self._direct = DirectMaker(processor)
        self._threads = ThreadPoolExecutor(max_workers, thread_name_prefix="media-worker")
        self._turns = Turns(max_workers, cost_per_s=BYTES_PER_S)

    async def picture(self, data: bytes | Image.Image, knobs: ImageKnobs, *, client: str = "") -> ProcessedImage:
        async with self._turns.turn(cost=_cost([data]), client=client):
            return await self._to_its_end(self._direct.picture, data, knobs)

    async def clip(self, data: bytes, knobs: VideoKnobs, *, client: str = "") -> ProcessedVideo:
        async with self._turns.turn(cost=_cost([data]), clip=True, client=client):
            return await self._to_its_end(self._direct.clip, data, knobs)

    async def frames(
        self, files: Sequence[bytes | Image.Image], knobs: VideoKnobs, *, client: str = ""
    ) -> ProcessedVideo:
        async with self._turns.turn(cost=_cost(files), clip=True, client=client):
            return await self._to_its_end(self._direct.frames, files, knobs)

    async def call(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call a function in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **kwargs))

    async def _to_its_end(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Do what `call` does, but return only when the thread has ended, even if cancelled: until then its turn is
        taken."""
        under_way = asyncio.ensure_future(self.call(function, *args, **kwargs))
        try:
            return await asyncio.shield(under_way)
        finally:
            await asyncio.wait([under_way])

    async def close(self) -> None:
        """Refuse new work, and wait for the threads."""
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)


def _cost(files: Sequence[bytes | Image.Image]) -> float:
    """Return the cost for `Turns`: bytes of files, or the number of pixels of Pillow pictures."""
    return 1.0 + sum(len(file) if isinstance(file, bytes) else math.prod(file.size) for file in files)


def closing_error() -> BadRequestError:
    """Return the error of a request that comes during shutdown."""
    return BadRequestError("the server is shutting down", code="shutting_down", status=503)
