"""Makes patches from the bytes of files, which costs CPU time, and which a malicious file can break."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import ParamSpec, Protocol, TypeAlias, TypeVar

from PIL import Image

from processors.audio.options import AudioKnobs
from processors.families.base import MultimodalProcessor, ProcessedMedium
from processors.image.decoding import decode_image
from processors.knobs import ImageKnobs
from processors.pool.turns import BYTES_PER_S, Turns
from processors.video.adaptive import FirstLook
from processors.video.options import VideoKnobs
from vlmserve_common.errors import BadRequestError

Made: TypeAlias = ProcessedMedium | FirstLook
"""What is made of a medium."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


class FatalMediumError(BadRequestError):
    """A medium made the process that decoded it crash or exceed its limits. It is not tried again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaWork:
    """A medium to process. The type of the knobs says what it is: a picture, a video, or a sound.

    `files`: the file's bytes; with `listed`, the video's frames, each a picture file. Pillow pictures can replace
    picture files in a `ThreadMaker`.
    """

    files: Sequence[bytes | Image.Image]
    knobs: ImageKnobs | VideoKnobs | AudioKnobs
    listed: bool = False

    @property
    def is_clip(self) -> bool:
        """Whether it may take long: a video or a sound."""
        return not isinstance(self.knobs, ImageKnobs)

    @property
    def cost(self) -> float:
        """The cost for `Turns`: bytes of files, or the number of pixels of Pillow pictures."""
        return 1.0 + sum(len(file) if isinstance(file, bytes) else math.prod(file.size) for file in self.files)


class MediaMaker(Protocol):
    """Decodes, resizes and cuts files."""

    async def make(self, work: MediaWork, *, client: str = "") -> ProcessedMedium:
        """Process a medium. Cancelling the call ends the work. Raises BadRequestError for a bad file.

        `client`: whose work it is; clients take turns.
        """

    async def look(self, work: MediaWork, *, client: str = "") -> FirstLook:
        """Return the frames of a clip that are to be compared with a question, likewise."""

    async def close(self) -> None:
        """Free all resources. Calls under way, and later ones, fail with status 503."""


class DirectMaker:
    """Processes media in the calling thread. Thread-safe."""

    def __init__(self, processor: MultimodalProcessor) -> None:
        self._processor = processor
        self._pillow = Lock()

    def make(self, work: MediaWork) -> ProcessedMedium:
        if isinstance(work.knobs, ImageKnobs):
            return self._processor.process_image(self._decoded(work.files[0]), work.knobs)
        if isinstance(work.knobs, AudioKnobs):
            [sound] = work.files
            assert isinstance(sound, bytes)
            return self._processor.process_audio(sound)
        if work.listed and work.knobs.h264_frames is not None:
            return self._processor.process_units([file for file in work.files if isinstance(file, bytes)], work.knobs)
        if work.listed:
            return self._processor.process_frames(self._frames(work.files), len(work.files), work.knobs)
        [clip] = work.files
        assert isinstance(clip, bytes)
        return self._processor.process_video(clip, work.knobs)

    def look(self, work: MediaWork) -> FirstLook:
        [clip] = work.files
        assert isinstance(clip, bytes)
        assert isinstance(work.knobs, VideoKnobs)
        return self._processor.look(clip, work.knobs)

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

    async def make(self, work: MediaWork, *, client: str = "") -> ProcessedMedium:
        return await self._in_turn(self._direct.make, work, client)

    async def look(self, work: MediaWork, *, client: str = "") -> FirstLook:
        return await self._in_turn(self._direct.look, work, client)

    async def _in_turn(self, function: Callable[[MediaWork], _T], work: MediaWork, client: str) -> _T:
        async with self._turns.turn(cost=work.cost, clip=work.is_clip, client=client):
            under_way = asyncio.ensure_future(self.call(function, work))
            try:
                return await asyncio.shield(under_way)
            finally:
                await asyncio.wait([under_way])  # even if cancelled: until the thread has ended, its turn is taken

    async def call(self, function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Call a function in one of the threads."""
        # not a closure: an error's frames would keep its cells, and with them the medium's bytes
        return await asyncio.get_running_loop().run_in_executor(self._threads, partial(function, *args, **kwargs))

    async def close(self) -> None:
        """Refuse new work, and wait for the threads."""
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)


def closing_error() -> BadRequestError:
    """Return the error of a request that comes during shutdown."""
    return BadRequestError("the server is shutting down", code="shutting_down", status=503)
