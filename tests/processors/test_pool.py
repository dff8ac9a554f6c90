"""The worker pool and its cache: order, limits, errors, cancelling, closing."""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import threading
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from processors.families.base import ImageKnobs, ProcessedImage
from processors.fetch.fetching import MediaFetcher, MediaFile
from processors.fetch.limits import FetchSettings
from processors.pool import pool as pool_module
from processors.pool.maker import FatalMediumError, MediaWork
from processors.pool.pool import PoolSettings, ProcessorCache, ProcessorPool
from processors.pool.requests import ImageRequest, VideoRequest
from processors.video.options import VideoKnobs
from tests import hf_env  # noqa: F401
from tests.processors.clips import jpeg, make_clip
from tests.processors.helpers import encoded, picture, processed, tiny_processor
from tests.processors.web import serve
from vlmserve_common.errors import BadRequestError


@pytest.fixture
def processor(tmp_path):
    return tiny_processor(tmp_path, "qwen2_vl")


@pytest.fixture
def make_pool(processor, tmp_path):
    pools = []

    def make(**settings):
        fetcher = MediaFetcher(
            FetchSettings(allow_private_media=True, timeout_s=20, allowed_local_media_path=str(tmp_path))
        )
        pools.append(ProcessorPool(processor, fetcher, PoolSettings(**settings)))
        return pools[-1]

    yield make
    for pool in pools:
        asyncio.run(pool.close())


def load(pool, *requests):
    """In an event loop of its own."""
    return asyncio.run(pool.load(requests))


class Gate:
    """Holds every `process_image` until opened; counts who came in."""

    def __init__(self, processor, monkeypatch):
        self.arrived = threading.Semaphore(0)
        self.opened = threading.Event()
        self.calls = 0
        real = processor.process_image

        def gated(image, knobs=None):
            self.calls += 1
            self.arrived.release()
            assert self.opened.wait(20)
            return real(image, knobs)

        monkeypatch.setattr(processor, "process_image", gated)

    async def someone_arrived(self):
        assert await asyncio.to_thread(self.arrived.acquire, timeout=20)


def data_url(data):
    return "data:image/png;base64," + base64.b64encode(data).decode()


def serve_files(server, files):
    """Let the server answer /NAME with files[NAME]."""

    def answer(body):
        return lambda self, _: self.answer(200, body)

    handlers = {f"get_{name}": answer(body) for name, body in files.items()}
    server.RequestHandlerClass = type("Handler", (server.RequestHandlerClass,), handlers)


def test_every_kind_of_source_in_order(make_pool, processor, tmp_path):
    images = [picture(40 + 20 * n, 60, n) for n in range(5)]
    (tmp_path / "x.png").write_bytes(encoded(images[3]))
    uploaded = SlowFile(encoded(images[2]))
    uploaded.gate.set()
    with serve() as server:
        serve_files(server, {"picture": encoded(images[4])})
        sources = [
            data_url(encoded(images[0])),
            encoded(images[1]),
            images[2],
            f"file://{tmp_path}/x.png",
            server.url("/picture"),
            uploaded,
        ]
        images.append(images[2])
        requests = [ImageRequest(source=source) for source in sources]
        pool = make_pool()
        results = load(pool, *requests)
    assert [result.digest for result in results] == [processor.process_image(image).digest for image in images]
    assert [result.source_size for result in results] == [image.size for image in images]
    assert pool.in_pool == 0


def test_it_is_told_of_each_medium_before_that_is_decoded(make_pool, processor, monkeypatch):
    gate = Gate(processor, monkeypatch)
    fetched = []

    async def scenario():
        requests = [ImageRequest(source=encoded(picture(40, 60, n))) for n in range(2)]
        loading = asyncio.ensure_future(
            make_pool().load(requests, fetched=lambda: fetched.append(gate.opened.is_set()))
        )
        await gate.someone_arrived()
        await gate.someone_arrived()
        gate.opened.set()
        await loading

    asyncio.run(scenario())
    assert fetched == [False, False]


def test_one_pillow_picture_given_many_times(make_pool):
    """Opened lazily by the caller: two threads must not decode it at once."""
    image = Image.open(io.BytesIO(encoded(picture(400, 400))))
    results = load(make_pool(max_workers=4), *[ImageRequest(source=image)] * 12)
    assert len({result.digest for result in results}) == 1


def test_a_full_pool_refuses(make_pool, processor, monkeypatch):
    gate = Gate(processor, monkeypatch)

    async def scenario():
        pool = make_pool(max_workers=1, max_queued=3)
        one = [ImageRequest(source=encoded(picture(30, 30)))]
        with pytest.raises(BadRequestError, match="4 media in one request, the limit is 3") as caught:
            await pool.load(one * 4)
        assert caught.value.status == 400
        running = asyncio.create_task(pool.load(one * 2))
        await gate.someone_arrived()
        assert pool.in_pool == 2
        with pytest.raises(BadRequestError, match=r"2 media are .* 2 more came") as caught:
            await pool.load(one * 2)
        assert caught.value.status == 429
        last = asyncio.create_task(pool.load(one))
        gate.opened.set()
        assert len(await running) == 2
        assert len(await last) == 1
        assert pool.in_pool == 0

    asyncio.run(scenario())


async def cancelled(task):
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


class SlowFile(MediaFile):
    """A file on a disk that answers when `gate` is opened."""

    modality = None

    def __init__(self, data):
        self.data = data
        self.reading, self.gate = threading.Event(), threading.Event()

    def read(self, limit):
        self.reading.set()
        assert self.gate.wait(20)
        return self.data


def test_what_keeps_others_waiting_keeps_nobody_else(make_pool):
    """Hosts that stall, lists of their frames, disks; with one worker."""

    async def scenario():
        pool, file = make_pool(max_workers=1), SlowFile(b"")
        with serve() as server:
            serve_files(server, {"picture": encoded(picture(30, 30))})
            url = server.url("/stall")
            requests = [ImageRequest(source=url), VideoRequest(source=(url,) * 9), ImageRequest(source=file)] * 9
            stuck = [asyncio.create_task(pool.load([request])) for request in requests]
            for event in (server.stalled, file.reading):
                assert await asyncio.to_thread(event.wait, 20)
            for source in (server.url("/picture", host="localhost"), encoded(picture(30, 30))):
                assert await asyncio.wait_for(pool.load([ImageRequest(source=source)]), 20)
            for task in stuck:
                await cancelled(task)
            file.gate.set()
            assert pool.in_pool == 0

    asyncio.run(scenario())


def test_what_is_larger_than_the_memory_is_let_in_one_after_the_other(processor):
    """Two files from a disk of which one fits in: the second one goes on when the first one is processed."""
    data = encoded(Image.effect_noise((1400, 1400), 99).convert("RGB"))
    assert len(data) > 2**20
    one, other = SlowFile(data), SlowFile(data + b"\0")
    for file in (one, other):
        file.gate.set()
    pool = ProcessorPool(processor, MediaFetcher(FetchSettings(memory_mib=1)), PoolSettings())
    results = load(pool, ImageRequest(source=one), ImageRequest(source=other))
    assert results[0].digest == results[1].digest
    asyncio.run(pool.close())


def test_close_calls_off_and_refuses(make_pool, processor, monkeypatch):
    gate = Gate(processor, monkeypatch)
    data = encoded(picture(60, 60))

    async def scenario():
        pool = make_pool(max_workers=1)
        with serve() as server:
            sources = [data, data, encoded(picture(90, 90)), server.url("/stall"), (server.url("/stall"),) * 2]
            requests = [(VideoRequest if isinstance(one, tuple) else ImageRequest)(source=one) for one in sources]
            stuck = [asyncio.create_task(pool.load([request])) for request in requests]
            assert await asyncio.to_thread(server.stalled.wait, 20)
            await gate.someone_arrived()
            closing = asyncio.create_task(pool.close())
            for task in stuck:
                with pytest.raises(BadRequestError, match="shutting down") as caught:
                    await task
                assert caught.value.status == 503
            gate.opened.set()
            await closing
        for source in ("http://127.0.0.1:1/", data):
            with pytest.raises(BadRequestError, match="shutting down") as caught:
                await pool.load([ImageRequest(source=source)])
            assert caught.value.status == 503
        assert pool.in_pool == 0

    asyncio.run(scenario())
    assert gate.calls == 1


def test_an_error_does_not_keep_the_bytes_of_its_medium(make_pool):
    async def refuse() -> BadRequestError:
        with pytest.raises(BadRequestError, match="not a picture") as caught:
            await pool.load([ImageRequest(source=data)])
        return caught.value

    async def scenario() -> None:
        await refuse()
        gc.collect()
        gc.disable()  # who has to wait for it has many of them
        before = tracemalloc.get_traced_memory()[0]
        error = await refuse()
        await pool.close()
        await asyncio.get_running_loop().shutdown_default_executor()  # a thread lets go of its work after the result
        assert tracemalloc.get_traced_memory()[0] - before < size // 2, error

    pool, size = make_pool(), 2**24
    data = data_url(bytes(size))
    tracemalloc.start()
    try:
        asyncio.run(scenario())
    finally:
        tracemalloc.stop()
        gc.enable()


# ---------------------------------------------------------------- the cache


def test_a_picture_sent_again_is_not_processed_again(make_pool, processor, monkeypatch):
    gate = Gate(processor, monkeypatch)
    gate.opened.set()
    pool = make_pool()
    data = encoded(picture(60, 60))
    first = load(pool, ImageRequest(source=data))[0]
    again = load(pool, ImageRequest(source=data_url(data)))[0]
    assert again is first
    assert gate.calls == 1
    other = load(pool, ImageRequest(source=data, knobs=ImageKnobs(max_pixels=784 * 4)))[0]
    assert other.grid_thw == first.grid_thw
    assert gate.calls == 2, "other knobs, another entry"


def test_who_waits_for_what_is_being_made_keeps_no_worker(make_pool, processor, monkeypatch):
    gate = Gate(processor, monkeypatch)
    data = encoded(picture(60, 60))

    async def scenario():
        pool = make_pool(max_workers=2)
        same = asyncio.create_task(pool.load([ImageRequest(source=data)] * 3))
        await gate.someone_arrived()
        other = asyncio.create_task(pool.load([ImageRequest(source=encoded(picture(90, 90)))]))
        await gate.someone_arrived()
        gate.opened.set()
        assert len(set(map(id, await same))) == 1
        await other

    asyncio.run(scenario())
    assert gate.calls == 2


class SlowMaker:
    """Makes nothing, as slowly as one likes. answer: what it raises when `gate` is opened."""

    def __init__(self, answer=None):
        self.answer = answer or BadRequestError("of the medium", code="bad")
        self.calls = self.called_off = 0
        self.called, self.gate = asyncio.Event(), asyncio.Event()

    async def make(self, work, *, client=""):
        self.calls += 1
        self.called.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.called_off += 1
            raise
        raise self.answer

    async def close(self):
        pass


def test_a_failure_is_everybodys_who_waits_each_with_its_own_place(processor):
    async def scenario():
        maker = SlowMaker()
        pool = ProcessorPool(processor, MediaFetcher(FetchSettings()), PoolSettings(), maker)
        data = encoded(picture(60, 60))
        tasks = [asyncio.create_task(pool.load([ImageRequest(source=data, param=f"p{n}")])) for n in range(3)]
        await maker.called.wait()
        maker.gate.set()
        errors = await asyncio.gather(*tasks, return_exceptions=True)
        assert [(error.message, error.code, error.param) for error in errors] == [
            ("of the medium", "bad", f"p{n}") for n in range(3)
        ]
        assert maker.calls == 1
        with pytest.raises(BadRequestError, match="of the medium"):
            await pool.load([ImageRequest(source=encoded(picture(60, 60)))])
        assert maker.calls == 2, "an ordinary failure is not remembered"
        assert pool.in_pool == 0
        await pool.close()

    asyncio.run(scenario())


def test_fatal_media_are_not_tried_again(processor, monkeypatch):
    monkeypatch.setattr(pool_module, "_MOST_FATAL", 2)

    async def scenario():
        maker = SlowMaker(FatalMediumError("it broke", code="media_crash", status=400))
        maker.gate.set()
        pool = ProcessorPool(processor, MediaFetcher(FetchSettings()), PoolSettings(), maker)

        async def fails(data, match):
            with pytest.raises(BadRequestError, match=match) as caught:
                await pool.load([ImageRequest(source=data, param="here")])
            assert (caught.value.code, caught.value.param) == ("media_crash", "here")

        for data in (b"one", b"two"):
            await fails(data, "^it broke$")
            await fails(data, "it broke; it is not tried again")
        assert maker.calls == 2
        await fails(b"three", "^it broke$")
        await fails(b"one", "^it broke$")  # only so many are remembered
        assert maker.calls == 4
        await pool.close()

    asyncio.run(scenario())


def test_keys_tell_apart_what_is_asked_and_of_what():
    image, video, fast = ImageKnobs(), VideoKnobs(), VideoKnobs(fps=3)
    asked = [([b"a"], knobs) for knobs in (image, ImageKnobs(max_pixels=9), video)]
    lists = [
        ([b"a"], video),
        ([b"a"], fast),
        ([b"a", b""], video),
        ([b"ab"], video),
        ([b"a", b"b"], video),
        ([], video),
    ]
    works = [MediaWork(files=files, knobs=knobs) for files, knobs in asked]
    works += [MediaWork(files=files, knobs=knobs, listed=True) for files, knobs in lists]
    assert len({ProcessorCache.key(work) for work in works}) == len(works)
    assert ProcessorCache.key(replace(works[2], knobs=VideoKnobs())) == ProcessorCache.key(works[2])


def entry(size, mark=0):
    return processed(bytes([mark]), np.full(size // 4, mark, np.float32))


def test_the_least_recently_used_goes_first():
    cache = ProcessorCache(400)
    for name in (b"a", b"b", b"c"):
        cache.put(name, entry(100))
    assert cache.get(b"a") is not None
    cache.put(b"d", entry(200))
    assert [cache.get(name) is not None for name in (b"a", b"b", b"c", b"d")] == [True, False, True, True]


def test_replacing_and_oversized_entries_keep_the_books():
    cache = ProcessorCache(400)
    cache.put(b"a", entry(100))
    cache.put(b"a", entry(300, 7))
    cache.put(b"b", entry(100))
    assert cache.get(b"a").digest == b"\7", "both fit, so the first one of a no longer counts"
    cache.put(b"c", entry(404))
    assert [cache.get(name) is not None for name in (b"a", b"b", b"c")] == [True, True, False]


# ---------------------------------------------------------------- videos


def test_videos_from_every_source_in_order(make_pool, processor, tmp_path):
    clip, frames = make_clip(12), [jpeg(number) for number in range(3)]
    (tmp_path / "clip.mp4").write_bytes(clip)
    joined = "data:video/jpeg;base64," + ",".join(base64.b64encode(frame).decode() for frame in frames)
    pool = make_pool()
    with serve() as server:
        serve_files(server, {"clip": clip, "zero": frames[0], "one": frames[1]})
        url = f"http://127.0.0.1:{server.server_port}/"
        sources = [
            clip,
            data_url(clip),
            (tmp_path / "clip.mp4").as_uri(),
            url + "clip",
            joined,
            tuple(frames),
            (url + "zero", url + "one", data_url(frames[2])),
        ]
        requests = [VideoRequest(source=source) for source in sources]
        requests.insert(2, ImageRequest(source=frames[0]))
        loaded = asyncio.run(pool.load(requests))
    assert isinstance(loaded.pop(2), ProcessedImage)
    whole, listed = processor.process_video(clip), processor.process_video([Image.open(io.BytesIO(f)) for f in frames])
    assert [video.digest for video in loaded] == [whole.digest] * 4 + [listed.digest] * 3
    assert pool.in_pool == 0


def test_a_video_sent_again_is_not_decoded_again(make_pool, processor, monkeypatch):
    pool, clip, frames = make_pool(), make_clip(12), (jpeg(0), jpeg(1))
    asked = [
        VideoRequest(source=clip),
        VideoRequest(source=clip, knobs=VideoKnobs(num_frames=6)),
        VideoRequest(source=frames),
        VideoRequest(source=frames[::-1]),
    ]
    first = load(pool, *asked)
    assert len({video.digest for video in first}) == 4
    monkeypatch.setattr(processor, "process_video", None)
    monkeypatch.setattr(processor, "process_frames", None)
    for before, after in zip(first, load(pool, *asked), strict=True):
        assert after is before


NEVER_FETCHED = "http://127.0.0.1:1/never-fetched"
BAD = {
    "bytes": (ImageRequest(source=b"no picture"), "not a picture"),
    "data": (ImageRequest(source=data_url(b"no picture")), "not a picture"),
    "nonsense": (ImageRequest(source="data:nonsense"), "without a comma"),
    "ratio": (ImageRequest(source=picture(401, 2)), "aspect ratio"),
    "video": (VideoRequest(source=data_url(b"no video")), "not a video of a supported format"),
    "frame": (VideoRequest(source=(jpeg(0), b"no picture")), "frame 1 of the video: the data is not a picture"),
    "sizes": (VideoRequest(source=(jpeg(0), jpeg(0, 64, 64))), "all frames of a video must have one size"),
    "none": (VideoRequest(source=()), "empty list"),
    "joined": (VideoRequest(source="data:video/jpeg;base64,%%%"), "frame 0|base64"),
    "fps": (VideoRequest(source=NEVER_FETCHED, knobs=VideoKnobs(fps=0.0)), "fps is 0.0"),
    "count": (VideoRequest(source=(NEVER_FETCHED,) * 769), "769 frames; the limit is 768"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_name_the_request_field(make_pool, name):
    pool, (request, match) = make_pool(), BAD[name]
    with pytest.raises(BadRequestError, match=match) as caught:
        load(pool, ImageRequest(source=encoded(picture(30, 30))), replace(request, param="messages[0].content[1]"))
    assert caught.value.param == "messages[0].content[1]"
    assert caught.value.status == 400
    assert pool.in_pool == 0


def test_a_joined_list_of_far_too_many_frames_is_refused_before_it_is_taken_apart(make_pool):
    pool, url = make_pool(), "data:video/jpeg;base64," + "," * 2**20
    tracemalloc.start()
    try:
        with pytest.raises(BadRequestError, match=r"769 frames; the limit is 768 \(setting --max-video-frames\)"):
            load(pool, VideoRequest(source=url))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * len(url), "a few copies of the text, not an object for each comma"


def test_videos_have_a_byte_limit_of_their_own(processor):
    clip = make_clip(12)
    settings = FetchSettings(allow_private_media=True, max_bytes=10, max_video_bytes=len(clip))
    pool = ProcessorPool(processor, MediaFetcher(settings), PoolSettings())
    tight = ProcessorPool(processor, MediaFetcher(replace(settings, max_video_bytes=len(clip) - 1)), PoolSettings())
    with serve() as server:
        serve_files(server, {"clip": clip, "frame": jpeg(0)})
        url = f"http://127.0.0.1:{server.server_port}/"
        for source in (url + "clip", data_url(clip)):
            (video,) = load(pool, VideoRequest(source=source))
            assert video.num_tokens
            with pytest.raises(BadRequestError, match=r"limit (is|of) .*--max-video-bytes"):
                load(tight, VideoRequest(source=source))
        with pytest.raises(BadRequestError, match="--media-max-bytes"):  # a frame is a picture
            load(pool, VideoRequest(source=(url + "frame",)))
    for one in (pool, tight):
        asyncio.run(one.close())


def test_a_failure_calls_off_the_rest(make_pool, processor, monkeypatch):
    gate = Gate(processor, monkeypatch)

    async def scenario():
        pool = make_pool(max_workers=1)
        bad = ImageRequest(source="ftp://x")  # fails in a download thread, while the only worker is held
        rest = [ImageRequest(source=encoded(picture(30, 30, n))) for n in range(5)]
        with pytest.raises(BadRequestError, match="ftp"):
            await pool.load([*rest, bad])
        assert pool.in_pool == 0
        gate.opened.set()
        await pool.close()

    asyncio.run(scenario())
    assert gate.calls <= 1, "what was queued was never begun"


def test_addresses_of_videos_are_checked_as_those_of_pictures(processor):
    pool = ProcessorPool(processor, MediaFetcher(FetchSettings()), PoolSettings())
    for source in ("http://127.0.0.1/clip.mp4", "file:///etc/passwd", ("http://127.0.0.1/a.jpg",)):
        with pytest.raises(BadRequestError, match="refused"):
            load(pool, VideoRequest(source=source))
    asyncio.run(pool.close())
