"""Lists of frames: fetched side by side, and otherwise as if one after the other."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from processors.fetch.fetching import FetchSettings, MediaFetcher
from processors.fetch.frame_lists import FrameLists
from processors.pool.pool import PoolSettings, ProcessorPool
from processors.pool.requests import VideoRequest
from tests import hf_env  # noqa: F401
from tests.processors.clips import jpeg
from tests.processors.helpers import tiny_processor
from tests.processors.web import Server, serve
from vlmserve_common.errors import BadRequestError

WAIT_S = 20.0  # a bound for waits on other threads, never waited for when all is well
PARAM = "messages[0].content[1]"


class FrameServer:
    """/frame?N answers with N bytes of N, /meet?N when `together` are there, /late?N when others stall (/late: 404)."""

    def __init__(self, server: Server, together: int) -> None:
        self.server = server
        self.barrier = threading.Barrier(together, timeout=WAIT_S)
        self.lock = threading.Lock()
        self.inside = self.most = 0
        methods = {"get_frame": self.frame, "get_meet": self.meet, "get_late": self.late}
        server.RequestHandlerClass = type("Handler", (server.RequestHandlerClass,), methods)

    @staticmethod
    def frame(handler, query):
        handler.answer(200, bytes([int(query)]) * int(query))

    @property
    def meet(self):
        def answer(handler, query):
            with self.lock:
                self.inside += 1
                self.most = max(self.most, self.inside)
            self.barrier.wait()
            with self.lock:
                self.inside -= 1
            self.barrier.wait()
            self.frame(handler, query)

        return answer

    @staticmethod
    def late(handler, query):
        assert handler.server.stalled.wait(WAIT_S)
        if query:
            FrameServer.frame(handler, query)
        else:
            handler.answer(404)


@pytest.fixture
def frames():
    with serve() as server:
        yield FrameServer(server, together=3)


def lists(at_a_time=3, **settings):
    fetcher = MediaFetcher(FetchSettings(**{"allow_private_media": True, "timeout_s": 60.0, **settings}))
    return FrameLists(fetcher, max_frames=12, at_a_time=at_a_time)


def test_frames_are_fetched_side_by_side_and_come_in_order(frames):
    urls = [frames.server.url(f"/meet?{n}") for n in range(1, 10)]
    mixed = [*urls[:2], b"given", *urls[2:], "data:;base64,aGk="]
    got = lists().fetch(mixed, PARAM)
    wanted = [bytes([n]) * n for n in range(1, 10)]
    assert got == (*wanted[:2], b"given", *wanted[2:], b"hi")
    assert frames.most == 3, "three at a time, and no more"


def test_a_failure_breaks_off_what_is_under_way(frames):
    start = time.monotonic()
    urls = [frames.server.url("/late"), *[frames.server.url("/stall")] * 2]
    with pytest.raises(BadRequestError, match="HTTP status 404") as caught:
        lists().fetch(urls, PARAM)
    assert caught.value.param == PARAM
    assert time.monotonic() - start < 30, "those that stall were broken off"


def test_too_many_bytes_break_off_what_is_under_way(frames):
    start = time.monotonic()
    urls = [frames.server.url(path) for path in ("/stall", "/late?60", "/late?60", "/frame?1")]
    with pytest.raises(BadRequestError, match=r"together than 100 bytes \(setting --max-video-bytes\)") as caught:
        lists(max_video_bytes=100).fetch(urls, PARAM)
    assert caught.value.param == PARAM
    assert time.monotonic() - start < 30
    assert lists(max_video_bytes=100).fetch([frames.server.url("/frame?50")] * 2, PARAM) == (bytes([50]) * 50,) * 2


@pytest.mark.parametrize("bad", ["/error", "data:nonsense"])
def test_the_first_failure_of_a_list_is_told(frames, bad):
    bad = bad if bad.startswith("data:") else frames.server.url(bad)
    match = "HTTP status 500" if bad.startswith("http") else "without a comma"
    for _ in range(10):
        with pytest.raises(BadRequestError, match=match):
            lists().fetch([frames.server.url("/frame?1"), bad, frames.server.url("/missing"), "ftp://x"], PARAM)


def test_a_list_does_not_wait_for_threads_that_wait_for_it(frames, tmp_path):
    """With one thread of each kind, and more lists than that."""
    body = jpeg(0)
    frames.server.RequestHandlerClass.get_picture = lambda handler, _: handler.answer(200, body)
    settings = PoolSettings(max_workers=1, max_downloads=1, max_frame_downloads=1)
    fetcher = MediaFetcher(FetchSettings(allow_private_media=True, timeout_s=WAIT_S))
    pool = ProcessorPool(tiny_processor(tmp_path, "qwen2_vl"), fetcher, settings)
    request = VideoRequest(source=(frames.server.url("/picture"),) * 4)

    async def load():
        return await asyncio.wait_for(pool.load([request] * 3), WAIT_S)

    assert len({video.digest for video in asyncio.run(load())}) == 1
    pool.close()


def test_closing_the_pool_breaks_off_its_lists(frames, tmp_path):
    async def scenario():
        fetcher = MediaFetcher(FetchSettings(allow_private_media=True, timeout_s=60))
        pool = ProcessorPool(tiny_processor(tmp_path, "qwen2_vl"), fetcher, PoolSettings())
        request = VideoRequest(source=(frames.server.url("/stall"),) * 6)
        loading = asyncio.create_task(pool.load([request]))
        assert await asyncio.to_thread(frames.server.stalled.wait, WAIT_S)
        await asyncio.wait_for(asyncio.to_thread(pool.close), 30)
        with pytest.raises(BadRequestError, match=r"cannot fetch|shutting down"):
            await loading

    asyncio.run(scenario())


def test_a_child_ends_alone_and_with_its_parent(frames):
    parent = MediaFetcher(FetchSettings(allow_private_media=True, timeout_s=60))
    one, other = parent.child(), parent.child()
    good, stall = frames.server.url("/frame?3"), frames.server.url("/stall")
    assert one.fetch(good) == other.fetch(good) == b"\3\3\3"
    failures = []

    def run(fetcher):
        with pytest.raises(BadRequestError) as caught:
            fetcher.fetch(stall)
        failures.append(caught.value)

    def breaks_off(closed, user):
        frames.server.stalled.clear()
        thread = threading.Thread(target=run, args=(user,))
        thread.start()
        assert frames.server.stalled.wait(WAIT_S)
        closed.close()
        thread.join(WAIT_S)
        assert not thread.is_alive()

    breaks_off(one, one)
    with pytest.raises(BadRequestError, match="shutting down"):
        one.fetch(good)
    assert parent.fetch(good) == other.fetch(good) == b"\3\3\3"
    breaks_off(parent, other)
    for closed in (other, parent, parent.child()):
        with pytest.raises(BadRequestError, match="shutting down"):
            closed.fetch(good)
    assert len(failures) == 2
