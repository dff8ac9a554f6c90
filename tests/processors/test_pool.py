"""The worker pool and its cache: order, limits, errors, cancelling, closing."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from processors.families.base import ImageKnobs, ProcessedImage
from processors.fetch.fetching import FetchSettings, MediaFetcher
from processors.fetch.media_file import MediaFile
from processors.pool.cache import ProcessorCache
from processors.pool.pool import PoolSettings, ProcessorPool
from processors.pool.requests import ImageRequest, VideoRequest
from processors.video.options import VideoKnobs
from tests import hf_env  # noqa: F401
from tests.processors.clips import jpeg, make_clip
from tests.processors.helpers import encoded, picture, tiny_processor
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
        pool.close()


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


def serve_picture(server, image):
    """Let the server answer /picture with `image`."""
    body = encoded(image)
    server.RequestHandlerClass = type(
        "Handler", (server.RequestHandlerClass,), {"get_picture": lambda self, _: self.answer(200, body)}
    )


def test_every_kind_of_source_in_order(make_pool, processor, tmp_path):
    images = [picture(40 + 20 * n, 60, n) for n in range(5)]
    (tmp_path / "x.png").write_bytes(encoded(images[3]))
    with serve() as server:
        serve_picture(server, images[4])
        sources = [
            data_url(encoded(images[0])),
            encoded(images[1]),
            images[2],
            f"file://{tmp_path}/x.png",
            server.url("/picture"),
        ]
        requests = [ImageRequest(source=source) for source in sources]
        pool = make_pool()
        loaded = [pool.load_sync(requests), asyncio.run(pool.load(requests))]
    for results in loaded:
        assert [result.digest for result in results] == [processor.process_image(image).digest for image in images]
        assert [result.source_size for result in results] == [image.size for image in images]
    assert pool.in_pool == 0


def test_no_pictures(make_pool):
    assert asyncio.run(make_pool().load([])) == []
    assert make_pool().load_sync([]) == []


def test_knobs_count(make_pool, processor):
    data, knobs = encoded(picture(300, 310)), ImageKnobs(max_pixels=9 * 784)
    requests = [ImageRequest(source=data), ImageRequest(source=data, knobs=knobs), ImageRequest(source=data)]
    results = make_pool().load_sync(requests)
    full, small = processor.num_image_tokens(310, 300), processor.num_image_tokens(310, 300, knobs)
    assert small <= 9 < 40 < full
    assert [result.num_tokens for result in results] == [full, small, full]


def test_one_pillow_picture_given_many_times(make_pool):
    """Opened lazily by the caller: two threads must not decode it at once."""
    image = Image.open(io.BytesIO(encoded(picture(400, 400))))
    results = make_pool(max_workers=4).load_sync([ImageRequest(source=image)] * 12)
    assert len({result.digest for result in results}) == 1


BAD_SOURCES = [b"no picture", data_url(b"no picture"), "data:nonsense", "/etc/hostname", picture(401, 2)]


@pytest.mark.parametrize("source", BAD_SOURCES, ids=["bytes", "data", "nonsense", "path", "ratio"])
def test_errors_name_the_request_field(make_pool, source):
    pool = make_pool()
    request = ImageRequest(source=source, param="messages[0].content[1]")
    for load in (pool.load_sync, lambda requests: asyncio.run(pool.load(requests))):
        with pytest.raises(BadRequestError) as caught:
            load([ImageRequest(source=encoded(picture(30, 30))), request])
        assert caught.value.param == "messages[0].content[1]"
        assert caught.value.status == 400
    pool.close()  # a worker may have been at the other picture
    assert pool.in_pool == 0


def test_a_failure_calls_off_the_rest(make_pool, processor, monkeypatch):
    gate = Gate(processor, monkeypatch)

    async def scenario():
        pool = make_pool(max_workers=1)
        bad = ImageRequest(source="ftp://x")  # fails in a download thread, while the only worker is held
        rest = [ImageRequest(source=encoded(picture(30, 30, n))) for n in range(5)]
        with pytest.raises(BadRequestError, match="ftp"):
            await pool.load([*rest, bad])
        assert pool.in_pool <= 1, "the one that a worker may be at"
        gate.opened.set()
        await asyncio.to_thread(pool.close)
        assert pool.in_pool == 0

    asyncio.run(scenario())
    assert gate.calls <= 1, "what was queued was never begun"


def test_a_full_pool_refuses(make_pool, processor, monkeypatch):
    gate = Gate(processor, monkeypatch)

    async def scenario():
        pool = make_pool(max_workers=1, max_queued=3)
        one = [ImageRequest(source=encoded(picture(30, 30)))]
        with pytest.raises(BadRequestError, match="4 pictures and videos in one request, the limit is 3") as caught:
            await pool.load(one * 4)
        assert caught.value.status == 400
        running = asyncio.create_task(pool.load(one * 2))
        await gate.someone_arrived()
        assert pool.in_pool == 2
        with pytest.raises(BadRequestError, match=r"2 pictures and videos are .* 2 more came") as caught:
            await pool.load(one * 2)
        assert caught.value.status == 429
        last = asyncio.create_task(pool.load(one))
        gate.opened.set()
        assert len(await running) == 2
        assert len(await last) == 1
        assert pool.in_pool == 0

    asyncio.run(scenario())


def test_cancelling_frees_the_queue(make_pool, processor, monkeypatch):
    gate = Gate(processor, monkeypatch)

    async def scenario():
        pool = make_pool(max_workers=1, max_queued=8)
        task = asyncio.create_task(pool.load([ImageRequest(source=encoded(picture(30, 30, n))) for n in range(8)]))
        await gate.someone_arrived()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pool.in_pool == 1, "the one that a worker is at, whoever wants it"
        with pytest.raises(BadRequestError, match="1 pictures and videos are being processed and 8 more came"):
            await pool.load([ImageRequest(source=b"")] * 8)
        gate.opened.set()
        result = await pool.load([ImageRequest(source=encoded(picture(30, 30, 99)))])
        assert len(result) == 1
        assert pool.in_pool == 0

    asyncio.run(scenario())
    assert gate.calls == 2, "the seven that waited were never begun"


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


def test_what_was_cancelled_while_it_was_fetched_is_not_decoded(make_pool, processor, monkeypatch):
    gate = Gate(processor, monkeypatch)
    gate.opened.set()
    file, other = (SlowFile(encoded(picture(30, 30, n))) for n in range(2))
    other.gate.set()

    async def scenario():
        pool = make_pool(max_downloads=1, max_queued=1)
        task = asyncio.create_task(pool.load([ImageRequest(source=file)]))
        assert await asyncio.to_thread(file.reading.wait, 20)
        await cancelled(task)
        assert pool.in_pool == 1, "a thread is still at it"
        with pytest.raises(BadRequestError, match="being processed"):
            await pool.load([ImageRequest(source=other)])
        file.gate.set()
        await asyncio.to_thread(pool.load_sync, [ImageRequest(source=other)])  # in the same thread, after it
        assert pool.in_pool == 0

    asyncio.run(scenario())
    assert gate.calls == 1


def test_what_was_cancelled_is_not_fetched_any_further(make_pool):
    """With one thread for downloads, which a host that stalls keeps."""

    async def scenario():
        pool = make_pool(max_downloads=1)
        with serve() as server:
            serve_picture(server, picture(30, 30))
            for stalls in (server.url("/stall"), (server.url("/stall"),) * 2):
                server.stalled.clear()
                kind = VideoRequest if isinstance(stalls, tuple) else ImageRequest
                task = asyncio.create_task(pool.load([kind(source=stalls)]))
                assert await asyncio.to_thread(server.stalled.wait, 20)
                await cancelled(task)
                assert await asyncio.wait_for(pool.load([ImageRequest(source=server.url("/picture"))]), 20)
                assert pool.in_pool == 0

    asyncio.run(scenario())


def test_a_cancelled_download_does_not_wait_for_a_worker(make_pool, processor, monkeypatch):
    gate = Gate(processor, monkeypatch)
    files = [SlowFile(encoded(picture(30, 30, n))) for n in range(2)]

    async def scenario():
        pool = make_pool(max_workers=1, max_downloads=1)
        slow = asyncio.create_task(pool.load([ImageRequest(source=encoded(picture(40, 40)))]))
        await gate.someone_arrived()  # the only worker is held
        task = asyncio.create_task(pool.load([ImageRequest(source=files[0])]))
        files[0].gate.set()
        while not pool._workers._work_queue.qsize():
            await asyncio.sleep(0)
        await cancelled(task)
        assert pool.in_pool == 1
        last = asyncio.create_task(pool.load([ImageRequest(source=files[1])]))
        assert await asyncio.to_thread(files[1].reading.wait, 20), "the download thread is free again"
        for event in (files[1].gate, gate.opened):
            event.set()
        await asyncio.gather(slow, last)
        assert pool.in_pool == 0

    asyncio.run(scenario())
    assert gate.calls == 2


def test_the_event_loop_stays_free(make_pool, processor, monkeypatch):
    gate = Gate(processor, monkeypatch)

    async def scenario():
        task = asyncio.create_task(make_pool().load([ImageRequest(source=data_url(encoded(picture(30, 30))))]))
        await gate.someone_arrived()  # a worker is busy and this coroutine runs
        gate.opened.set()
        await task

    asyncio.run(scenario())


def test_hosts_that_stall_do_not_hold_up_others(make_pool):
    async def scenario():
        pool = make_pool(max_workers=1, max_downloads=2)
        with serve() as server:
            stuck = [asyncio.create_task(pool.load([ImageRequest(source=server.url("/stall"))])) for _ in range(4)]
            assert await asyncio.to_thread(server.stalled.wait, 20)
            assert await pool.load([ImageRequest(source=encoded(picture(30, 30)))])
            for task in stuck:
                task.cancel()
            await asyncio.gather(*stuck, return_exceptions=True)

    asyncio.run(scenario())


def test_close_breaks_off_and_refuses(make_pool):
    async def scenario():
        pool = make_pool()
        with serve() as server:
            stuck = asyncio.create_task(pool.load([ImageRequest(source=server.url("/stall"))]))
            assert await asyncio.to_thread(server.stalled.wait, 20)
            await asyncio.to_thread(pool.close)
            with pytest.raises(BadRequestError, match=r"cannot fetch|shutting down"):
                await stuck
        for source in ("http://127.0.0.1:1/", encoded(picture(30, 30))):
            with pytest.raises(BadRequestError, match="shutting down") as caught:
                await pool.load([ImageRequest(source=source)])
            assert caught.value.status == 503
        assert pool.in_pool == 0

    asyncio.run(scenario())


def test_a_bug_is_not_the_clients_fault(make_pool, processor, monkeypatch):
    def broken(image, knobs=None):
        raise RuntimeError("a bug")

    monkeypatch.setattr(processor, "process_image", broken)
    with serve() as server:
        serve_picture(server, picture(30, 30))
        for source in (encoded(picture(30, 30)), server.url("/picture")):
            with pytest.raises(RuntimeError, match="a bug"):
                make_pool().load_sync([ImageRequest(source=source)])


def test_torchs_thread_count_is_left_alone(make_pool):
    before = torch.get_num_threads()
    make_pool(max_workers=4).load_sync([ImageRequest(source=encoded(picture(300, 200, n))) for n in range(8)])
    assert torch.get_num_threads() == before


# ---------------------------------------------------------------- the cache


def test_a_picture_sent_again_is_not_processed_again(make_pool, processor, monkeypatch):
    gate = Gate(processor, monkeypatch)
    gate.opened.set()
    pool = make_pool()
    data = encoded(picture(60, 60))
    first = pool.load_sync([ImageRequest(source=data)])[0]
    again = pool.load_sync([ImageRequest(source=data_url(data))])[0]
    assert again is first
    assert gate.calls == 1
    other = pool.load_sync([ImageRequest(source=data, knobs=ImageKnobs(max_pixels=784 * 4))])[0]
    assert other.grid_thw == first.grid_thw
    assert gate.calls == 2, "other knobs, another entry"
    stats = pool.cache_stats()
    assert (stats.hits, stats.misses, stats.entries) == (1, 2, 2)
    assert stats.bytes == first.feature.nbytes + other.feature.nbytes


def test_no_cache(make_pool, processor, monkeypatch):
    gate = Gate(processor, monkeypatch)
    gate.opened.set()
    pool = make_pool(cache_mib=0)
    for _ in range(2):
        pool.load_sync([ImageRequest(source=encoded(picture(60, 60)))])
    assert gate.calls == 2
    assert pool.cache_stats().entries == 0


def test_a_picture_that_many_send_at_once_is_processed_once(make_pool, processor, monkeypatch):
    gate = Gate(processor, monkeypatch)
    pool = make_pool(max_workers=4)
    data = encoded(picture(60, 60))

    async def scenario():
        loading = asyncio.create_task(pool.load([ImageRequest(source=data)] * 8))
        await gate.someone_arrived()
        gate.opened.set()
        return await loading

    assert len(set(map(id, asyncio.run(scenario())))) == 1
    assert gate.calls == 1


def test_who_waits_for_what_is_being_made_keeps_no_worker(make_pool, processor, monkeypatch):
    gate = Gate(processor, monkeypatch)
    data = encoded(picture(60, 60))

    async def scenario():
        pool = make_pool(max_workers=2, max_downloads=1)
        same = asyncio.create_task(pool.load([ImageRequest(source=data)] * 3))
        file = SlowFile(data)
        file.gate.set()
        elsewhere = asyncio.create_task(pool.load([ImageRequest(source=file)]))
        await gate.someone_arrived()
        other = asyncio.create_task(pool.load([ImageRequest(source=encoded(picture(90, 90)))]))
        await gate.someone_arrived()
        last = SlowFile(data)
        last.gate.set()
        again = asyncio.create_task(pool.load([ImageRequest(source=last)]))
        assert await asyncio.to_thread(last.reading.wait, 20), "nor a download thread"
        gate.opened.set()
        results = [*await same, *await elsewhere, *await again]
        assert len(set(map(id, results))) == 1
        await other
        assert pool.in_pool == 0

    asyncio.run(scenario())
    assert gate.calls == 2


async def followed_by(pool, count):
    """Return when so many wait for what another one has in work."""
    while sum(map(len, pool._in_flight._followers.values())) < count:
        await asyncio.sleep(0)


def test_who_waits_is_unharmed_when_the_first_one_is_cancelled(make_pool, processor, monkeypatch):
    gate = Gate(processor, monkeypatch)
    request = ImageRequest(source=encoded(picture(60, 60)))

    async def scenario():
        pool = make_pool()
        first = asyncio.create_task(pool.load([request]))
        await gate.someone_arrived()
        second, third = (asyncio.create_task(pool.load([request])) for _ in range(2))
        await followed_by(pool, 2)
        await cancelled(first)
        await cancelled(third)
        assert pool.in_pool == 2, "the first one's is still in work; the third waited in nobody's hands"
        gate.opened.set()
        assert await second
        assert pool.in_pool == 0

    asyncio.run(scenario())
    assert gate.calls == 1


def test_who_waits_gets_no_error_of_the_first_one_s(make_pool, processor, monkeypatch):
    begun, go_on = threading.Event(), threading.Event()
    real, calls = processor.process_image, []

    def fails_once(image, knobs=None):
        calls.append(image)
        begun.set()
        assert go_on.wait(20)
        if len(calls) == 1:
            raise BadRequestError("of the first")
        return real(image, knobs)

    monkeypatch.setattr(processor, "process_image", fails_once)
    data = encoded(picture(60, 60))

    async def scenario():
        pool = make_pool(max_workers=2)
        first = asyncio.create_task(pool.load([ImageRequest(source=data, param="first")]))
        assert await asyncio.to_thread(begun.wait, 20)
        others = [asyncio.create_task(pool.load([ImageRequest(source=data)])) for _ in range(3)]
        await followed_by(pool, 3)
        go_on.set()
        with pytest.raises(BadRequestError, match="of the first") as caught:
            await first
        assert caught.value.param == "first"
        assert len({id(medium) for loaded in await asyncio.gather(*others) for medium in loaded}) == 1
        assert pool.in_pool == 0

    asyncio.run(scenario())
    assert len(calls) == 2, "made once more, for all others"


def test_closing_refuses_what_waits_before_what_is_in_work_is_done(make_pool, processor, monkeypatch):
    gate = Gate(processor, monkeypatch)
    data = encoded(picture(60, 60))

    async def scenario():
        pool = make_pool(max_workers=2)
        first = asyncio.create_task(pool.load([ImageRequest(source=data)]))
        await gate.someone_arrived()
        second = asyncio.create_task(pool.load([ImageRequest(source=data)]))
        await followed_by(pool, 1)
        other = asyncio.create_task(pool.load([ImageRequest(source=encoded(picture(40, 40)))]))
        await gate.someone_arrived()
        third = asyncio.create_task(pool.load([ImageRequest(source=encoded(picture(90, 90)))]))
        await asyncio.sleep(0)
        closing = asyncio.create_task(asyncio.to_thread(pool.close))
        for waits in (second, third):
            with pytest.raises(BadRequestError, match="shutting down") as caught:
                await waits
            assert caught.value.status == 503
        gate.opened.set()
        await closing
        assert await first
        assert await other
        assert pool.in_pool == 0

    asyncio.run(scenario())
    assert gate.calls == 2


def test_a_thread_that_cannot_be_had_is_no_shutdown(make_pool):
    pool = make_pool()
    pool._workers.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.load_sync([ImageRequest(source=b"")])
    assert pool.in_pool == 0


def test_keys_tell_apart_what_is_asked_and_of_what():
    image, video, fast = ImageKnobs(), VideoKnobs(), VideoKnobs(fps=3)
    asked = [("picture", [b"a"], image), ("picture", [b"a"], ImageKnobs(max_pixels=9)), ("clip", [b"a"], video)]
    asked += [("frames", [b"a"], video), ("frames", [b"a"], fast), ("frames", [b"a", b""], video)]
    asked += [("frames", [b"ab"], video), ("frames", [b"a", b"b"], video), ("frames", [], video)]
    assert len({ProcessorCache.key(*each) for each in asked}) == len(asked)
    assert ProcessorCache.key("clip", [b"a"], VideoKnobs()) == ProcessorCache.key("clip", [b"a"], video)


def processed(size, mark=0):
    feature = np.full(size // 4, mark, np.float32)
    return ProcessedImage(
        digest=bytes([mark]),
        patch_digests=(bytes([mark]),),
        grid_thw=(1, 2, 2),
        feature=feature,
        num_tokens=1,
        source_size=(1, 1),
    )


def test_the_least_recently_used_goes_first():
    cache = ProcessorCache(400)
    for name in (b"a", b"b", b"c"):
        cache.put(name, processed(100))
    assert cache.get(b"a") is not None
    cache.put(b"d", processed(200))
    assert [cache.get(name) is not None for name in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    assert cache.stats().bytes == 400


def test_replacing_and_oversized_entries_keep_the_books():
    cache = ProcessorCache(400)
    cache.put(b"a", processed(100))
    cache.put(b"a", processed(300, 7))
    assert cache.stats().bytes == 300
    assert cache.get(b"a").digest == b"\7"
    cache.put(b"b", processed(404))
    assert cache.stats().entries == 1


def test_many_threads_keep_the_books():
    cache = ProcessorCache(4000)

    def work(seed):
        rng = np.random.default_rng(seed)
        for _ in range(300):
            key = bytes([rng.integers(40)])
            if cache.get(key) is None:
                cache.put(key, processed(int(rng.integers(1, 100)) * 4))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stats = cache.stats()
    assert stats.hits + stats.misses == 1800
    assert stats.bytes <= 4000
    held = [cache.get(bytes([n])) for n in range(40)]
    assert sum(image.feature.nbytes for image in held if image) == stats.bytes


# ---------------------------------------------------------------- videos


def serve_files(server, files):
    """Let the server answer /NAME with files[NAME]."""

    def answer(body):
        return lambda self, _: self.answer(200, body)

    handlers = {f"get_{name}": answer(body) for name, body in files.items()}
    server.RequestHandlerClass = type("Handler", (server.RequestHandlerClass,), handlers)


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
    first = pool.load_sync(asked)
    assert len({video.digest for video in first}) == 4
    monkeypatch.setattr(processor, "process_video", None)
    monkeypatch.setattr(processor, "process_frames", None)
    for before, after in zip(first, pool.load_sync(asked), strict=True):
        assert after is before


BAD_VIDEOS = {
    "bytes": (b"no video", None, "not a video of a supported format"),
    "data": (data_url(b"no video"), None, "not a video"),
    "frame": ((jpeg(0), b"no picture"), None, "frame 1 of the video: the data is not a picture"),
    "sizes": ((jpeg(0), jpeg(0, 64, 64)), None, "all frames of a video must have one size"),
    "none": ((), None, "empty list"),
    "joined": ("data:video/jpeg;base64,%%%", None, "frame 0|base64"),
    "fps": ("http://127.0.0.1:1/never-fetched", VideoKnobs(fps=0.0), "fps is 0.0"),
    "count": (("http://127.0.0.1:1/never-fetched",) * 769, None, "769 frames; the limit is 768"),
}


@pytest.mark.parametrize("name", BAD_VIDEOS)
def test_errors_of_videos_name_the_request_field(make_pool, name):
    source, knobs, match = BAD_VIDEOS[name]
    pool = make_pool()
    request = VideoRequest(source=source, knobs=knobs, param="messages[0].content[1]")
    for load in (pool.load_sync, lambda requests: asyncio.run(pool.load(requests))):
        with pytest.raises(BadRequestError, match=match) as caught:
            load([request])
        assert caught.value.param == "messages[0].content[1]"
        assert caught.value.status == 400
    assert pool.in_pool == 0


def test_a_joined_list_of_far_too_many_frames_is_refused_before_it_is_taken_apart(make_pool):
    pool, url = make_pool(), "data:video/jpeg;base64," + "," * 2**20
    tracemalloc.start()
    try:
        with pytest.raises(BadRequestError, match=r"769 frames; the limit is 768 \(setting --max-video-frames\)"):
            pool.load_sync([VideoRequest(source=url)])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 8 * len(url), "a few copies of the text, not an object for each comma"


def test_a_joined_list_may_have_as_many_frames_as_allowed(make_pool, processor):
    most = processor.limits.video.max_frames
    url = "data:video/jpeg;base64," + ",".join(["%%%"] * most)
    with pytest.raises(BadRequestError, match="base64"):  # of a frame, not of their number
        make_pool().load_sync([VideoRequest(source=url)])


def test_videos_have_a_byte_limit_of_their_own(processor):
    clip = make_clip(12)
    settings = FetchSettings(allow_private_media=True, max_bytes=10, max_video_bytes=len(clip))
    pool = ProcessorPool(processor, MediaFetcher(settings), PoolSettings())
    tight = ProcessorPool(processor, MediaFetcher(replace(settings, max_video_bytes=len(clip) - 1)), PoolSettings())
    with serve() as server:
        serve_files(server, {"clip": clip, "frame": jpeg(0)})
        url = f"http://127.0.0.1:{server.server_port}/"
        for source in (url + "clip", data_url(clip)):
            (video,) = pool.load_sync([VideoRequest(source=source)])
            assert video.num_tokens
            with pytest.raises(BadRequestError, match=r"limit (is|of) .*--max-video-bytes"):
                tight.load_sync([VideoRequest(source=source)])
        with pytest.raises(BadRequestError, match="--media-max-bytes"):  # a frame is a picture
            pool.load_sync([VideoRequest(source=(url + "frame",))])
        settings = FetchSettings(allow_private_media=True, max_video_bytes=2 * len(jpeg(0)) + 9)
        small = ProcessorPool(processor, MediaFetcher(settings), PoolSettings())
        with pytest.raises(BadRequestError, match=r"larger together than .*--max-video-bytes"):
            small.load_sync([VideoRequest(source=(url + "frame",) * 3)])
    for one in (pool, tight, small):
        one.close()


def test_addresses_of_videos_are_checked_as_those_of_pictures(processor):
    pool = ProcessorPool(processor, MediaFetcher(FetchSettings()), PoolSettings())
    for source in ("http://127.0.0.1/clip.mp4", "file:///etc/passwd", ("http://127.0.0.1/a.jpg",)):
        with pytest.raises(BadRequestError, match="refused"):
            pool.load_sync([VideoRequest(source=source)])
    pool.close()


def test_the_event_loop_runs_while_a_video_is_decoded(make_pool, processor, monkeypatch):
    entered, leave = threading.Event(), threading.Event()
    real = processor.process_video

    def slow(*args):
        entered.set()
        assert leave.wait(20)
        return real(*args)

    monkeypatch.setattr(processor, "process_video", slow)
    pool = make_pool()

    async def main():
        loading = asyncio.create_task(pool.load([VideoRequest(source=make_clip(4))]))
        while not entered.is_set():
            await asyncio.sleep(0.01)
        leave.set()  # only a loop that is not blocked gets here
        return await loading

    assert asyncio.run(main())[0].num_tokens
