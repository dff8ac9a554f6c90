"""Fetch, decode and resize pictures and videos in threads, off the event loop, in bounded numbers.

Two thread pools: a few workers for what costs CPU time, and more of them for what waits on others (downloads, disks),
so that a host which does not answer holds up nobody's decoding. A downloading thread keeps its place until a worker has
let go of its medium: downloaded files that wait in memory are therefore never more than `max_downloads`. A list of
frames counts as one; what of it is remote comes in a few threads of the list's own. No worker waits for another: who
wants what one is making already follows it, in no thread at all.

Resizing 8-bit pictures uses one thread in torch whatever its settings, and numpy's arithmetic does too, so workers
neither read nor change torch's thread count.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from PIL import Image

from processors.embeds import parse_embeds
from processors.families.base import ImageKnobs, MultimodalProcessor, ProcessedMedium
from processors.fetch.fetching import MediaFetcher
from processors.fetch.frame_lists import FetchedFrame
from processors.fetch.sources import VideoSources, file_from
from processors.inputs import Modality
from processors.knobs import check_image_knobs
from processors.pool.blocking import BlockingMaker
from processors.pool.cache import CacheStats, ProcessorCache
from processors.pool.fatal_media import FatalMedia
from processors.pool.in_flight import InFlight
from processors.pool.job import Job
from processors.pool.maker import FatalMediumError, closing_error
from processors.pool.making import DirectMaker
from processors.pool.requests import ImageRequest, MediaRequest, VideoRequest, waits_for_others
from processors.video.options import VideoKnobs, check_knobs
from vlmserve_common.errors import BadRequestError

_Work: TypeAlias = Callable[[Job], None]
"""What a worker is to do for a job, whose bytes are there."""


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
        maker: BlockingMaker | None = None,
    ) -> None:
        self._processor = processor
        self._direct = DirectMaker(processor)
        self._maker: BlockingMaker | DirectMaker = maker or self._direct
        self._fatal = FatalMedia()
        self._fetcher = fetcher
        self._videos = VideoSources(
            max_frames=processor.limits.video.max_frames, frames_at_a_time=settings.max_frame_downloads
        )
        self._settings = settings
        self._cache = ProcessorCache(settings.cache_mib * 2**20)
        self._in_flight: InFlight[Job] = InFlight()
        self._workers = ThreadPoolExecutor(settings.max_workers, thread_name_prefix="media-worker")
        self._downloads = ThreadPoolExecutor(settings.max_downloads, thread_name_prefix="media-download")
        self._lock = threading.Lock()
        self._jobs: set[Job] = set()
        self._closing = False

    @property
    def in_pool(self) -> int:
        """Media that were taken and wait or are in work; zero when idle.

        One that was called off counts for as long as a thread is at it.
        """
        return len(self._jobs)

    def cache_stats(self) -> CacheStats:
        """Figures of the processor cache."""
        return self._cache.stats()

    async def load(self, requests: Sequence[MediaRequest]) -> list[ProcessedMedium]:
        """Fetch, decode and process all media of one request, in order.

        The first failure, or cancelling the caller, calls off the rest. Raises BadRequestError, with status 429 when
        the pool is full.
        """
        jobs = self._take(requests, self._settings.max_queued)
        try:
            return list(await asyncio.gather(*(asyncio.wrap_future(job.answer) for job in jobs)))
        finally:
            for job in jobs:
                job.call_off()

    def load_sync(self, requests: Sequence[MediaRequest]) -> list[ProcessedMedium]:
        """`load` for callers without an event loop. It waits for its turn instead of being refused."""
        for request in requests:
            for source in request.source if isinstance(request.source, tuple) else (request.source,):
                if isinstance(source, Image.Image):
                    # One Pillow object may be given twice, and two threads must not load it at once.
                    with contextlib.suppress(Exception):  # the worker will meet it again, and report it
                        source.load()
        jobs = self._take(requests)
        try:
            return [job.answer.result() for job in jobs]
        finally:
            for job in jobs:
                job.call_off()

    def close(self) -> None:
        """Refuse new work and what waits, break off downloads and wait for the workers."""
        with self._lock:
            self._closing = True
            jobs = list(self._jobs)
        self._fetcher.close()
        for executor in (self._downloads, self._workers):
            executor.shutdown(wait=False)
        for job in jobs:
            job.refuse(closing_error())
        self._maker.close()
        for executor in (self._downloads, self._workers):
            executor.shutdown(wait=True)

    def _take(self, requests: Sequence[MediaRequest], most: int | None = None) -> list[Job]:
        """A job for each request, waiting for a thread. most: jobs in the pool above which no more are taken."""
        for request in requests:
            self._check(request)
        jobs = [Job(request.param, self._fetcher.child(), self._leave) for request in requests]
        with self._lock:
            if self._closing:
                raise closing_error()
            if most is not None:
                _check_room(len(self._jobs), len(jobs), most)
            self._jobs.update(jobs)
        for job, request in zip(jobs, requests, strict=True):
            try:
                if waits_for_others(request):
                    job.submit(self._downloads, self._run, self._download, job, request)
                else:
                    job.submit(self._workers, self._run, self._fetch_and_work, job, request)
            except RuntimeError as error:
                self._fail(job, error)
        return jobs

    def _check(self, request: MediaRequest) -> None:
        """Before anything is fetched. What needs the picture or the clip is checked with it."""
        try:
            if isinstance(request, VideoRequest):
                check_knobs(request.knobs or VideoKnobs())
            elif isinstance(request, ImageRequest):
                check_image_knobs(request.knobs or ImageKnobs())
            else:
                self._processor.check_embeds_allowed()
        except BadRequestError as error:
            error.param = error.param or request.param
            raise

    def _leave(self, job: Job) -> None:
        with self._lock:
            self._jobs.remove(job)

    def _fail(self, job: Job, error: BaseException) -> None:
        # Closing breaks all kinds of things off, which fail in as many ways.
        job.fail(closing_error() if self._closing else error)

    # ---------------------------------------------------------------- what threads do

    def _run(self, step: Callable[..., None], job: Job, *args: Any) -> None:
        """A step of a job: whatever goes wrong, the job learns of it."""
        try:
            self._check_wanted(job)
            step(job, *args)
        except BaseException as error:
            self._fail(job, error)

    def _check_wanted(self, job: Job) -> None:
        if job.called_off or self._closing:
            raise CancelledError  # which nobody sees: the job is cancelled, or fails as closing does

    def _download(self, job: Job, request: MediaRequest) -> None:
        work = self._fetched(request, job.fetcher)
        self._check_wanted(job)
        job.submit(self._workers, self._run, work, job).result()

    def _fetch_and_work(self, job: Job, request: MediaRequest) -> None:
        self._fetched(request, job.fetcher)(job)

    def _fetched(self, request: MediaRequest, fetcher: MediaFetcher) -> _Work:
        """Fetch what a request names. What is left to do has bytes, frames, pictures or tensors in its hands."""
        if isinstance(request, VideoRequest):
            video = self._videos.fetch(request.source, fetcher, request.param)
            return partial(self._work_on_video, video, request.knobs or VideoKnobs())
        if isinstance(request, ImageRequest):
            picture = file_from(request.source, fetcher, Modality.IMAGE)
            return partial(self._work_on_picture, picture, request.knobs or ImageKnobs())
        return partial(self._work_on_embeds, file_from(request.source, fetcher, Modality.IMAGE))

    def _work_on_picture(self, source: bytes | Image.Image, knobs: ImageKnobs, job: Job) -> None:
        if isinstance(source, bytes):
            key = self._cache.key("picture", [source], knobs)
            self._make_once(job, key, partial(self._maker.picture, source, knobs))
        else:
            job.give(self._processor.process_image(source, knobs))

    def _work_on_video(self, source: bytes | tuple[FetchedFrame, ...], knobs: VideoKnobs, job: Job) -> None:
        if isinstance(source, bytes):
            key = self._cache.key("clip", [source], knobs)
            self._make_once(job, key, partial(self._maker.clip, source, knobs))
            return
        files = [frame for frame in source if isinstance(frame, bytes)]
        if len(files) < len(source):
            job.give(self._direct.frames(source, knobs))
        else:
            key = self._cache.key("frames", files, knobs)
            self._make_once(job, key, partial(self._maker.frames, files, knobs))

    def _work_on_embeds(self, source: bytes | Mapping[str, Any], job: Job) -> None:
        job.give(self._processor.process_embeds(parse_embeds(source) if isinstance(source, bytes) else source))

    def _make_once(self, job: Job, key: bytes, make: Callable[[], ProcessedMedium]) -> None:
        """Give the job what is cached, or what `make` makes; or let it follow the one that another worker makes it for.

        Who leads makes it for all. If that fails, or if nobody wants it for that one, the next one leads: nobody gets
        an error of another's, and whoever asked for it first may go. `make` is the same for all, as the key is.
        """
        if not self._in_flight.leads(key, job):
            job.wait_for(partial(self._in_flight.leave, key, job))
            return
        leader: Job | None = job
        while leader is not None:
            try:
                self._check_wanted(leader)
                made = self._find_or_make(key, make)
            except BaseException as error:
                self._fail(leader, error)
                leader = self._in_flight.hand_over(key)
            else:
                for each in (leader, *self._in_flight.done(key)):
                    each.give(made)
                return

    def _find_or_make(self, key: bytes, make: Callable[[], ProcessedMedium]) -> ProcessedMedium:
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


def _check_room(there: int, more: int, limit: int) -> None:
    if more > limit:
        raise BadRequestError(
            f"{more} pictures and videos in one request, the limit is {limit} (setting --max-queued-media)",
            code="too_many_media",
        )
    if there + more > limit:
        raise BadRequestError(
            f"{there} pictures and videos are being processed and {more} more came, the limit is {limit} (setting "
            "--max-queued-media); try again later",
            code="server_busy",
            status=429,
        )
