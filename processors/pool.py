"""Fetch, decode and resize pictures in threads, off the event loop, in bounded numbers.

Two thread pools: a few workers for what costs CPU time, and more of them for what waits on others (downloads, disks),
so that a host which does not answer holds up nobody's decoding. A downloading thread keeps its place until its picture
is processed: downloaded files that wait in memory are therefore never more than `max_downloads`.

Resizing 8-bit pictures uses one thread in torch whatever its settings, and numpy's arithmetic does too, so workers
neither read nor change torch's thread count.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass

from PIL import Image

from processors.base import ImageKnobs, MultimodalProcessor, ProcessedImage
from processors.cache import CacheStats, ProcessorCache
from processors.decoding import decode_image
from processors.fetching import MediaFetcher
from vlmserve.common.errors import BadRequestError


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRequest:
    """One picture to load. source: a URL, the bytes of a picture file, or a Pillow picture.

    param: the request field it came from, for error messages.
    """

    source: str | bytes | Image.Image
    knobs: ImageKnobs | None = None
    param: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSettings:
    """max_workers: threads that decode and resize. max_downloads: URLs fetched at a time.

    max_queued: pictures in the pool, waiting or in work, above which `load` refuses more.
    cache_mib: processed pictures kept, in MiB; 0 for none.
    """

    max_workers: int = 2
    max_downloads: int = 16
    max_queued: int = 1024
    cache_mib: int = 256


class ProcessorPool:
    """Loads pictures for `processor`. Thread-safe. Close it when done: it closes the fetcher, too."""

    def __init__(self, processor: MultimodalProcessor, fetcher: MediaFetcher, settings: PoolSettings) -> None:
        self._processor = processor
        self._fetcher = fetcher
        self._settings = settings
        self._cache = ProcessorCache(settings.cache_mib * 2**20)
        self._workers = ThreadPoolExecutor(settings.max_workers, thread_name_prefix="media-worker")
        self._downloads = ThreadPoolExecutor(settings.max_downloads, thread_name_prefix="media-download")
        self._lock = threading.Lock()
        self._in_pool = 0

    @property
    def in_pool(self) -> int:
        """Pictures that `load` has taken and not yet answered for; zero when idle."""
        return self._in_pool

    def cache_stats(self) -> CacheStats:
        """Figures of the processor cache."""
        return self._cache.stats()

    async def load(self, requests: Sequence[ImageRequest]) -> list[ProcessedImage]:
        """Fetch, decode and process all pictures of one request, in order.

        The first failure, or cancelling the caller, calls off the rest. Raises BadRequestError, with status 429 when
        the pool is full.
        """
        self._enter(len(requests))
        futures: list[Future[ProcessedImage]] = []
        try:
            futures.extend(self._submit(request) for request in requests)
            return list(await asyncio.gather(*map(asyncio.wrap_future, futures)))
        finally:
            for future in futures:
                future.cancel()
            self._leave(len(requests))

    def load_sync(self, requests: Sequence[ImageRequest]) -> list[ProcessedImage]:
        """`load` for callers without an event loop. It waits for its turn instead of being refused."""
        for request in requests:
            if isinstance(request.source, Image.Image):
                # One Pillow object may be given twice, and two threads must not load it at once.
                with contextlib.suppress(Exception):  # the worker will meet it again, and report it
                    request.source.load()
        futures: list[Future[ProcessedImage]] = []
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
        for executor in (self._downloads, self._workers):
            executor.shutdown(wait=True)

    def _enter(self, count: int) -> None:
        limit = self._settings.max_queued
        if count > limit:
            raise BadRequestError(
                f"{count} pictures in one request, the limit is {limit} (setting --max-queued-media)",
                code="too_many_media",
            )
        with self._lock:
            if self._in_pool + count > limit:
                raise BadRequestError(
                    f"{self._in_pool} pictures are being processed and {count} more came, the limit is {limit} "
                    "(setting --max-queued-media); try again later",
                    code="server_busy",
                    status=429,
                )
            self._in_pool += count

    def _leave(self, count: int) -> None:
        with self._lock:
            self._in_pool -= count

    def _submit(self, request: ImageRequest) -> Future[ProcessedImage]:
        source = request.source
        try:
            if isinstance(source, str) and source[:5].lower() != "data:":
                return self._downloads.submit(self._download, request, source)
            return self._workers.submit(self._process, request, source)
        except RuntimeError:  # an executor after its shutdown
            raise _closing() from None

    def _download(self, request: ImageRequest, url: str) -> ProcessedImage:
        data = self._fetcher.fetch(url, param=request.param)
        try:
            future = self._workers.submit(self._process, request, data)
        except RuntimeError:
            raise _closing() from None
        try:
            return future.result()
        except CancelledError:
            raise _closing() from None

    def _process(self, request: ImageRequest, source: str | bytes | Image.Image) -> ProcessedImage:
        try:
            if isinstance(source, str):
                source = self._fetcher.fetch(source)
            if isinstance(source, bytes):
                return self._process_file(source, request.knobs)
            return self._processor.process_image(source, request.knobs)
        except BadRequestError as error:
            error.param = error.param or request.param
            raise

    def _process_file(self, data: bytes, knobs: ImageKnobs | None) -> ProcessedImage:
        key = self._cache.key(data, knobs)
        found = self._cache.get(key)
        if found is None:
            image = decode_image(data, self._processor.limits.decode)
            found = self._processor.process_image(image, knobs)
            self._cache.put(key, found)
        return found


def _closing() -> BadRequestError:
    return BadRequestError("the server is shutting down", code="shutting_down", status=503)
