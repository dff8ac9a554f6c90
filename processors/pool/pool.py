"""Fetches, decodes and processes media for one event loop. Equal media are made once at a time.

The maker does the work that costs CPU time, and decides its order. Fetching costs none, and each fetch waits only for
its own host. Fetched files take part of a bounded memory until they are processed.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from traceback import clear_frames

from processors.audio.options import AudioKnobs
from processors.embeds import parse_embeds
from processors.families.base import ImageKnobs, MultimodalProcessor, ProcessedMedium
from processors.fetch.embedder import Embedder, EmbedderError
from processors.fetch.fetching import MediaFetcher, off_loop
from processors.fetch.limits import Claim
from processors.fetch.sources import VideoSources, call_off, file_from
from processors.hashing import digest_fields
from processors.inputs import Modality
from processors.knobs import check_image_knobs
from processors.pool.maker import FatalMediumError, MediaMaker, MediaWork, ThreadMaker, closing_error
from processors.pool.requests import AudioRequest, EmbedsRequest, ImageRequest, MediaRequest, VideoRequest
from processors.processed import nbytes_of
from processors.video.options import Focus, VideoKnobs, check_knobs
from vlmserve_common.errors import BadRequestError

_MOST_FATAL = 1024
_MOST_LOOKING = 8  # clips that are compared with questions at a time; their frames take a few MB each


def _ignore() -> None:
    """Do nothing: the default of `fetched`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolSettings:
    """Limits of a pool.

    `max_workers`: threads that decode and resize. `max_frame_downloads`: frames of one list fetched at a time.
    `max_queued`: pictures and videos in the pool, waiting or in work; `load` refuses more. `cache_mib`: MiB of
    processed pictures and videos kept; 0 for none.
    """

    max_workers: int = 2
    max_frame_downloads: int = 4
    max_queued: int = 1024
    cache_mib: int = 256


class ProcessorPool:
    """Loads pictures and videos for `processor`, in one event loop. Close it when done: it also closes fetcher and
    maker.

    `maker`: makes patches from files; threads by default. Pillow pictures and embeddings always stay with the threads.
    `embedder`: compares frames of clips with questions.
    """

    def __init__(
        self,
        processor: MultimodalProcessor,
        fetcher: MediaFetcher,
        settings: PoolSettings,
        maker: MediaMaker | None = None,
        embedder: Embedder | None = None,
    ) -> None:
        self._processor = processor
        self._threads = ThreadMaker(processor, settings.max_workers)
        self._maker = maker or self._threads
        self._fetcher = fetcher
        self._embedder = embedder
        self._looking = asyncio.Semaphore(_MOST_LOOKING)
        self._videos = VideoSources(
            fetcher, max_frames=processor.limits.video.max_frames, at_a_time=settings.max_frame_downloads
        )
        self._max_queued = settings.max_queued
        self._cache = ProcessorCache(settings.cache_mib * 2**20)
        self._fatal: dict[bytes, Callable[[], BadRequestError]] = {}
        self._in_pool: set[asyncio.Task[ProcessedMedium]] = set()
        self._in_work: dict[bytes, _InWork] = {}
        self._closing = False

    @property
    def in_pool(self) -> int:
        """Media that wait or are in work; zero when idle."""
        return len(self._in_pool)

    async def load(
        self, requests: Sequence[MediaRequest], *, client: str = "", fetched: Callable[[], None] = _ignore
    ) -> list[ProcessedMedium]:
        """Fetch, decode and process all media of one request, in order.

        The first failure calls off the rest, and so does cancelling the caller. `client`: the requester; clients take
        turns. `fetched`: called for each medium once its bytes are there. Raises BadRequestError, with status 429 when
        the pool is full.
        """
        if self._closing:
            raise closing_error()
        for request in requests:
            self._check(request)
        _check_room(len(self._in_pool), len(requests), self._max_queued)
        tasks = [self._begin(request, client, fetched) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        except BaseException as error:
            caller = asyncio.current_task()
            called_off = isinstance(error, asyncio.CancelledError) and caller is not None and caller.cancelling()
            if self._closing and not called_off:  # which breaks all kinds of things off, that fail in as many ways
                raise closing_error() from error
            raise
        finally:
            await call_off(tasks)
            tasks.clear()  # an error has this frame, and they have the error: a circle, with the medium's bytes in it

    async def close(self) -> None:
        """Refuse new work, and call off the present work."""
        self._closing = True
        await call_off(list(self._in_pool))
        self._fetcher.close()
        await self._maker.close()
        await self._threads.close()

    def _check(self, request: MediaRequest) -> None:
        """Check a request before anything is fetched. Checks that need the picture or clip come later."""
        try:
            if isinstance(request, VideoRequest):
                check_knobs(request.knobs or VideoKnobs())
                self._check_sampling(request.knobs)
            elif isinstance(request, ImageRequest):
                check_image_knobs(request.knobs or ImageKnobs())
            elif isinstance(request, EmbedsRequest):
                self._processor.check_embeds_allowed()
        except BadRequestError as error:
            error.param = error.param or request.param
            raise

    def _check_sampling(self, knobs: VideoKnobs | None) -> None:
        if knobs is not None and knobs.sampling == "question" and self._embedder is None:
            raise BadRequestError(
                "sampling question needs a server of embeddings, and this one knows none (setting --embedder-url)",
                code="invalid_value",
            )

    def _begin(self, request: MediaRequest, client: str, fetched: Callable[[], None]) -> asyncio.Task[ProcessedMedium]:
        task = asyncio.create_task(self._load(request, client, fetched))
        self._in_pool.add(task)
        task.add_done_callback(self._in_pool.discard)
        return task

    async def _load(self, request: MediaRequest, client: str, fetched: Callable[[], None]) -> ProcessedMedium:
        try:
            with self._fetcher.claim() as claim:
                if isinstance(request, EmbedsRequest):
                    return await self._load_embeds(request, claim, fetched)
                return await self._load_file(request, claim, client, fetched)
        except BadRequestError as error:
            # Raise a copy: requests for the same medium share the error. Its frames hold the medium's bytes, and form
            # reference cycles with the futures that it came through.
            clear_frames(error.__traceback__)
            param = error.param or request.param
            raise BadRequestError(error.message, param=param, code=error.code, status=error.status) from error

    async def _load_file(
        self,
        request: ImageRequest | VideoRequest | AudioRequest,
        claim: Claim,
        client: str,
        fetched: Callable[[], None],
    ) -> ProcessedMedium:
        work = await self._fetch(request, claim)
        fetched()
        if all(isinstance(file, bytes) for file in work.files):
            return await self._make_once(work, request.tenant, client)
        return await self._threads.make(work, client=client)

    async def _load_embeds(self, request: EmbedsRequest, claim: Claim, fetched: Callable[[], None]) -> ProcessedMedium:
        rows = await file_from(request.source, self._fetcher, claim)
        fetched()

        def process() -> ProcessedMedium:
            tensors = parse_embeds(rows, request.modality) if isinstance(rows, bytes) else rows
            if request.modality is Modality.VIDEO:
                return self._processor.process_video_embeds(tensors)
            return self._processor.process_embeds(tensors)

        return await self._threads.call(process)

    async def _fetch(self, request: ImageRequest | VideoRequest | AudioRequest, claim: Claim) -> MediaWork:
        if isinstance(request, AudioRequest):
            sound = await file_from(request.source, self._fetcher, claim, Modality.AUDIO)
            return MediaWork(files=[sound], knobs=AudioKnobs())
        if isinstance(request, ImageRequest):
            picture = await file_from(request.source, self._fetcher, claim)
            return MediaWork(files=[picture], knobs=request.knobs or ImageKnobs())
        video = await self._videos.fetch(
            request.source, claim, limited=not (request.knobs and request.knobs.h264_frames)
        )
        files = [video] if isinstance(video, bytes) else video
        return MediaWork(files=files, knobs=request.knobs or VideoKnobs(), listed=not isinstance(video, bytes))

    async def _make_once(self, work: MediaWork, tenant: str, client: str) -> ProcessedMedium:
        """Return the cached medium, or the one made for all requests that ask for it meanwhile.

        They share its failure. It is called off when the last request has gone.
        """
        key = await off_loop(math.ceil(work.cost), self._cache.key, work, tenant)
        shared = self._in_work.get(key)
        if shared is None:
            found = self._cache.get(key)
            if found is not None:
                return found
            if key in self._fatal:
                raise self._fatal[key]()
            shared = self._in_work[key] = _InWork(task=asyncio.create_task(self._make(key, work, client)))
        shared.wanted_by += 1
        try:
            return await asyncio.shield(shared.task)
        finally:
            shared.wanted_by -= 1
            if not shared.wanted_by:
                shared.task.cancel()
                del self._in_work[key]

    async def _make(self, key: bytes, work: MediaWork, client: str) -> ProcessedMedium:
        try:
            work = await self._focused(work, client)
            made = await self._maker.make(work, client=client)
        except FatalMediumError as error:
            what = f"{error.message}; it is not tried again"
            # Not an error, whose traceback would hold the medium's bytes.
            self._fatal[key] = partial(BadRequestError, what, code=error.code, status=error.status)
            if len(self._fatal) > _MOST_FATAL:
                del self._fatal[next(iter(self._fatal))]
            raise
        if not (isinstance(work.knobs, VideoKnobs) and work.knobs.focus is not None and work.knobs.focus.may_do):
            self._cache.put(key, made)
        return made

    async def _focused(self, work: MediaWork, client: str) -> MediaWork:
        """Return the work with what the embedder says of a clip that is sampled by a question."""
        knobs = work.knobs
        if not isinstance(knobs, VideoKnobs) or knobs.sampling != "question" or work.listed:
            return work
        focus = knobs.focus or Focus(question="")
        if not focus.question:
            focus = replace(focus, failure="there is no text beside the video")
        else:
            assert self._embedder is not None
            async with self._looking:
                try:
                    self._embedder.check_asked()
                    found = await self._maker.look(work, client=client)
                    near = await self._embedder.nearness(focus.question, found.pictures)
                    focus = replace(focus, nearness=tuple(zip(found.places, near, strict=True)))
                except EmbedderError as error:
                    focus = replace(focus, failure=str(error))
        return replace(work, knobs=replace(knobs, focus=focus))


@dataclass(slots=True)
class _InWork:
    """A medium that is being made. `wanted_by`: how many requests wait for it."""

    task: asyncio.Task[ProcessedMedium]
    wanted_by: int = 0


def _check_room(there: int, more: int, limit: int) -> None:
    if more > limit:
        raise BadRequestError(
            f"{more} media in one request, the limit is {limit} (setting --max-queued-media)",
            code="too_many_media",
        )
    if there + more > limit:
        raise BadRequestError(
            f"{there} media are being processed and {more} more came, the limit is {limit} (setting "
            "--max-queued-media); try again later",
            code="server_busy",
            status=429,
        )


class ProcessorCache:
    """Evicts the least recently used medium first. `max_bytes` bounds the features held; 0 turns the cache off."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, ProcessedMedium] = OrderedDict()
        self._bytes = 0

    @staticmethod
    def key(work: MediaWork, tenant: str = "") -> bytes:
        """Return the key of files, knobs and tenant. Knobs are dataclasses: their repr holds their type and values."""
        files = [file for file in work.files if isinstance(file, bytes)]
        return digest_fields([bytes([work.listed]), repr(work.knobs).encode(), tenant.encode(), *files])

    def get(self, key: bytes) -> ProcessedMedium | None:
        """Return the medium under `key`, if it is still cached."""
        found = self._entries.get(key)
        if found is not None:
            self._entries.move_to_end(key)
        return found

    def put(self, key: bytes, medium: ProcessedMedium) -> None:
        """Keep `medium`, and evict the least recently used for it. A medium larger than the cache is not kept."""
        if nbytes_of(medium) > self._max_bytes:
            return
        old = self._entries.pop(key, None)
        if old is not None:
            self._bytes -= nbytes_of(old)
        self._entries[key] = medium
        self._bytes += nbytes_of(medium)
        while self._bytes > self._max_bytes:
            _, evicted = self._entries.popitem(last=False)
            self._bytes -= nbytes_of(evicted)
