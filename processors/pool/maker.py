"""From the bytes of files to patches: the half of the work that costs CPU time, and that a malicious file can break."""

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


class DirectMaker:
    """Makes them in the calling thread. Thread-safe. Pillow pictures may stand in the place of files."""

    def __init__(self, processor: MultimodalProcessor) -> None:
        self._processor = processor
        self._pillow = Lock()

    def picture(self, data: bytes | Image.Image, knobs: ImageKnobs) -> ProcessedImage:
        """See `MediaMaker`."""
        return self._processor.process_image(self._decoded(data), knobs)

    def clip(self, data: bytes, knobs: VideoKnobs) -> ProcessedVideo:
        """See `MediaMaker`."""
        return self._processor.process_video(data, knobs)

    def frames(self, files: Sequence[bytes | Image.Image], knobs: VideoKnobs) -> ProcessedVideo:
        """See `MediaMaker`."""
        return self._processor.process_frames(self._frames(files), len(files), knobs)

    def _frames(self, frames: Sequence[bytes | Image.Image]) -> Iterator[Image.Image]:
        """One at a time: memory never holds them all at full size."""
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
    """See `MediaMaker`: in threads. What a thread has begun it ends, whoever wants it."""

    def __init__(self, processor: MultimodalProcessor, max_workers: int) -> None:
        self._direct = DirectMaker(processor)
        self._threads = ThreadPoolExecutor(max_workers, thread_name_prefix="media-worker")
        self._turns = Turns(max_workers, cost_per_s=BYTES_PER_S)

    async def picture(self, data: bytes | Image.Image, knobs: ImageKnobs, *, client: str = "") -> ProcessedImage:
        """See `MediaMaker`."""
        async with self._turns.turn(cost=_cost([data]), client=client):
            return await self._to_its_end(self._direct.picture, data, knobs)

    async def clip(self, data: bytes, knobs: VideoKnobs, *, client: str = "") -> ProcessedVideo:
        """See `MediaMaker`."""
        async with self._turns.turn(cost=_cost([data]), clip=True, client=client):
            return await self._to_its_end(self._direct.clip, data, knobs)

    async def frames(
        self, files: Sequence[bytes | Image.Image], knobs: VideoKnobs, *, client: str = ""
    ) -> ProcessedVideo:
        """See `MediaMaker`."""
        async with self._turns.turn(cost=_cost(files), clip=True, client=client):
            return await self._to_its_end(self._direct.frames, files, knobs)

    async def call(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call a function in one of the threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args, **kwargs))

    async def _to_its_end(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """As `call`. Cancelled, it returns when the thread has ended all the same: so long it has its turn."""
        under_way = asyncio.ensure_future(self.call(function, *args, **kwargs))
        try:
            return await asyncio.shield(under_way)
        finally:
            await asyncio.wait([under_way])

    async def close(self) -> None:
        """Returns when what was begun has ended."""
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)


def _cost(files: Sequence[bytes | Image.Image]) -> float:
    """See `Turns`: bytes of files, or as many as a picture's pixels."""
    return 1.0 + sum(len(file) if isinstance(file, bytes) else math.prod(file.size) for file in files)


def closing_error() -> BadRequestError:
    """What a request gets that comes too late."""
    return BadRequestError("the server is shutting down", code="shutting_down", status=503)
