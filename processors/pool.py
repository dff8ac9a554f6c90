"""Fetch, decode and resize pictures and videos in threads, off the event loop, in bounded numbers.

Two thread pools: a few workers for what costs CPU time, and more of them for what waits on others (downloads, disks),
so that a host which does not answer holds up nobody's decoding. A downloading thread keeps its place until its picture
is processed: downloaded files that wait in memory are therefore never more than `max_downloads`. A list of frames
counts as one; what of it is remote comes in a few threads of the list's own.

Resizing 8-bit pictures uses one thread in torch whatever its settings, and numpy's arithmetic does too, so workers
neither read nor change torch's thread count.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from PIL import Image

from processors.base import ImageKnobs, MultimodalProcessor, ProcessedImage, ProcessedMedium
from processors.cache import CacheStats, ProcessorCache
from processors.embeds import parse_embeds
from processors.fatal_media import FatalMedia
from processors.fetching import MediaFetcher, is_remote
from processors.frame_lists import Frame, FrameLists
from processors.in_flight import InFlight
from processors.inputs import Modality
from processors.knobs import check_image_knobs
from processors.making import DirectMaker, FatalMediumError, MediaMaker, closing_error
from processors.media_file import MediaFile
from processors.video import ProcessedVideo
from processors.video_options import VideoKnobs, check_knobs
from vlmserve.common.errors import BadRequestError


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRequest:
    """One picture to load. source: a URL, a file, its bytes, or a Pillow picture.

    param: the request field it came from, for error messages.
    """

    source: str | bytes | MediaFile | Image.Image
    knobs: ImageKnobs | None = None
    param: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoRequest:
    """One video to load. source: a URL, a file or its bytes, or its frames, each a URL, bytes or a Pillow picture."""

    source: str | bytes | MediaFile | tuple[Frame, ...]
    knobs: VideoKnobs | None = None
    param: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbedsRequest:
    """One picture that comes encoded. source: a URL, a safetensors file or its bytes, or tensors by name."""

    source: str | bytes | MediaFile | Mapping[str, Any]
    param: str | None = None


MediaRequest: TypeAlias = ImageRequest | VideoRequest | EmbedsRequest
# A list of JPEG frames in one URL, base64 each, with commas between them, as vLLM takes it.
_JPEG_FRAMES = re.compile(r"data:video/jpeg;base64,", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSettings:
    """max_workers: threads that decode and resize. max_downloads: URLs fetched at a time, lists of frames as one.

    max_frame_downloads: frames of one list fetched at a time.
    max_queued: pictures and videos in the pool, waiting or in work, above which `load` refuses more.
    cache_mib: processed pictures and videos kept, in MiB; 0 for none.
    """

    max_workers: int = 2
    max_downloads: int = 16
    max_frame_downloads: int = 4
    max_queued: int = 1024
    cache_mib: int = 256


class ProcessorPool:
    """Loads pictures and videos for `processor`. Thread-safe. Close it when done: it closes fetcher and maker, too.

    maker: makes patches of files; by default the pool's threads do. What comes as Pillow pictures stays with them.
    """

    def __init__(
        self,
        processor: MultimodalProcessor,
        fetcher: MediaFetcher,
        settings: PoolSettings,
        maker: MediaMaker | None = None,
    ) -> None:
        self._processor = processor
        self._direct = DirectMaker(processor)
        self._maker = maker or self._direct
        self._fatal = FatalMedia()
        self._fetcher = fetcher
        self._frame_lists = FrameLists(
            fetcher, max_frames=processor.limits.video.max_frames, at_a_time=settings.max_frame_downloads
        )
        self._settings = settings
        self._cache = ProcessorCache(settings.cache_mib * 2**20)
        self._in_flight: InFlight[ProcessedMedium] = InFlight()
        self._workers = ThreadPoolExecutor(settings.max_workers, thread_name_prefix="media-worker")
        self._downloads = ThreadPoolExecutor(settings.max_downloads, thread_name_prefix="media-download")
        self._lock = threading.Lock()
        self._in_pool = 0

    @property
    def in_pool(self) -> int:
        """Media that `load` has taken and not yet answered for; zero when idle."""
        return self._in_pool

    def cache_stats(self) -> CacheStats:
        """Figures of the processor cache."""
        return self._cache.stats()

    async def load(self, requests: Sequence[MediaRequest]) -> list[ProcessedMedium]:
        """Fetch, decode and process all media of one request, in order.

        The first failure, or cancelling the caller, calls off the rest. Raises BadRequestError, with status 429 when
        the pool is full.
        """
        self._enter(len(requests))
        futures: list[Future[ProcessedMedium]] = []
        try:
            futures.extend(self._submit(request) for request in requests)
            return list(await asyncio.gather(*map(asyncio.wrap_future, futures)))
        finally:
            for future in futures:
                future.cancel()
            self._leave(len(requests))

    def load_sync(self, requests: Sequence[MediaRequest]) -> list[ProcessedMedium]:
        """`load` for callers without an event loop. It waits for its turn instead of being refused."""
        for request in requests:
            for source in request.source if isinstance(request.source, tuple) else (request.source,):
                if isinstance(source, Image.Image):
                    # One Pillow object may be given twice, and two threads must not load it at once.
                    with contextlib.suppress(Exception):  # the worker will meet it again, and report it
                        source.load()
        futures: list[Future[ProcessedMedium]] = []
        try:
            futures.extend(self._submit(request) for request in requests)
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()

    def close(self) -> None:
        """Refuse new work, drop what is queued, break off downloads and wait for the workers."""
        self._fetcher.close()
        for executor in (self._downloads, self._workers):
            executor.shutdown(wait=False, cancel_futures=True)
        self._maker.close()
        for executor in (self._downloads, self._workers):
            executor.shutdown(wait=True)

    def _enter(self, count: int) -> None:
        limit = self._settings.max_queued
        if count > limit:
            raise BadRequestError(
                f"{count} pictures and videos in one request, the limit is {limit} (setting --max-queued-media)",
                code="too_many_media",
            )
        with self._lock:
            if self._in_pool + count > limit:
                raise BadRequestError(
                    f"{self._in_pool} pictures and videos are being processed and {count} more came, the limit is "
                    f"{limit} (setting --max-queued-media); try again later",
                    code="server_busy",
                    status=429,
                )
            self._in_pool += count

    def _leave(self, count: int) -> None:
        with self._lock:
            self._in_pool -= count

    def _submit(self, request: MediaRequest) -> Future[ProcessedMedium]:
        source = request.source
        try:
            if isinstance(request, VideoRequest):
                # Before anything is fetched. What needs the clip is checked with it.
                check_knobs(request.knobs or VideoKnobs())
            elif isinstance(request, ImageRequest):
                check_image_knobs(request.knobs or ImageKnobs())
            else:
                self._processor.check_embeds_allowed()
            if any(map(_is_remote, source if isinstance(source, tuple) else (source,))):
                return self._downloads.submit(self._download, request)
            return self._workers.submit(self._process, request)
        except BadRequestError as error:
            error.param = error.param or request.param
            raise
        except RuntimeError:  # an executor after its shutdown
            raise closing_error() from None

    def _download(self, request: MediaRequest) -> ProcessedMedium:
        source = request.source
        if isinstance(request, VideoRequest) and isinstance(source, tuple):
            request = replace(request, source=self._frame_lists.fetch(source, request.param))
        else:
            modality = Modality.VIDEO if isinstance(request, VideoRequest) else Modality.IMAGE
            assert isinstance(source, str | MediaFile)
            request = replace(request, source=self._fetch(source, request.param, modality))
        try:
            future = self._workers.submit(self._process, request)
        except RuntimeError:
            raise closing_error() from None
        try:
            return future.result()
        except CancelledError:
            raise closing_error() from None

    def _fetch(self, source: str | MediaFile, param: str | None, modality: Modality) -> bytes:
        if isinstance(source, str):
            return self._fetcher.fetch(source, param=param, modality=modality)
        try:
            return source.read(self._fetcher.limit(modality))
        except BadRequestError as error:
            error.param = error.param or param
            raise

    def _process(self, request: MediaRequest) -> ProcessedMedium:
        try:
            if isinstance(request, VideoRequest):
                return self._process_video(request)
            if isinstance(request, EmbedsRequest):
                return self._process_embeds(request)
            source = request.source
            if isinstance(source, str | MediaFile):
                source = self._fetch(source, request.param, Modality.IMAGE)
            if isinstance(source, bytes):
                return self._process_file(source, request.knobs or ImageKnobs())
            return self._processor.process_image(source, request.knobs)
        except BadRequestError as error:
            error.param = error.param or request.param
            raise

    def _process_file(self, data: bytes, knobs: ImageKnobs) -> ProcessedImage:
        found = self._once(self._cache.key("picture", [data], knobs), partial(self._maker.picture, data, knobs))
        assert isinstance(found, ProcessedImage)
        return found

    def _once(self, key: bytes, make: Callable[[], ProcessedMedium]) -> ProcessedMedium:
        """From the cache, or from another thread that is making it, or by `make`."""

        def find_or_make() -> ProcessedMedium:
            found = self._cache.get(key)
            if found is None:
                self._fatal.check(key)
                try:
                    found = make()
                except FatalMediumError as error:
                    self._fatal.add(key, error)
                    raise
                self._cache.put(key, found)
            return found

        return self._in_flight.share(key, find_or_make)

    def _process_embeds(self, request: EmbedsRequest) -> ProcessedImage:
        source = request.source
        if isinstance(source, str | MediaFile):
            source = self._fetch(source, request.param, Modality.IMAGE)
        return self._processor.process_embeds(parse_embeds(source) if isinstance(source, bytes) else source)

    def _process_video(self, request: VideoRequest) -> ProcessedVideo:
        source, knobs = request.source, request.knobs or VideoKnobs()
        match = _JPEG_FRAMES.match(source) if isinstance(source, str) else None
        if match:
            # One part more than there may be tells enough: millions of commas would be gigabytes of parts.
            parts = match.string[match.end() :].split(",", self._processor.limits.video.max_frames)
            source = tuple(f"data:image/jpeg;base64,{part}" for part in parts)
        elif isinstance(source, str | MediaFile):
            source = self._fetch(source, request.param, Modality.VIDEO)
        if isinstance(source, bytes):
            key, make = self._cache.key("clip", [source], knobs), partial(self._maker.clip, source, knobs)
        else:
            fetched = self._frame_lists.fetch(source, request.param)
            files = [frame for frame in fetched if isinstance(frame, bytes)]
            if len(files) < len(fetched):
                return self._direct.frames(fetched, knobs)
            key, make = self._cache.key("frames", files, knobs), partial(self._maker.frames, files, knobs)
        found = self._once(key, make)
        assert isinstance(found, ProcessedVideo)
        return found


def _is_remote(source: object) -> bool:
    return isinstance(source, MediaFile) or (isinstance(source, str) and is_remote(source))
