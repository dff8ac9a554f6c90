"""Lists of frames: fetched side by side, and otherwise as if one after the other."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from processors.fetch.fetching import MediaFetcher, MediaFile
from processors.fetch.limits import FetchSettings
from processors.fetch.sources import VideoSources, file_from
from tests import hf_env  # noqa: F401
from tests.processors.web import Server, serve
from vlmserve_common.errors import BadRequestError

WAIT_S = 20.0  # a bound for waits on other threads, never waited for when all is well


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


def fetch(frames, at_a_time=3, **settings):
    fetcher = MediaFetcher(FetchSettings(**{"allow_private_media": True, "timeout_s": 60.0, **settings}))
    return asyncio.run(VideoSources(fetcher, max_frames=12, at_a_time=at_a_time).fetch(frames, fetcher.claim()))


def test_frames_are_fetched_side_by_side_and_come_in_order(frames):
    urls = [frames.server.url(f"/meet?{n}") for n in range(1, 10)]
    mixed = [*urls[:2], b"given", *urls[2:], "data:;base64,aGk="]
    got = fetch(mixed)
    wanted = [bytes([n]) * n for n in range(1, 10)]
    assert got == (*wanted[:2], b"given", *wanted[2:], b"hi")
    assert frames.most == 3, "three at a time, and no more"


@pytest.mark.parametrize(
    ("paths", "settings", "match"),
    [
        (("/late", "/stall", "/stall"), {}, "HTTP status 404"),
        (
            ("/stall", "/late?60", "/late?60", "/frame?1"),
            {"max_video_bytes": 100},
            r"together than 100 bytes \(setting --max-video-bytes\)",
        ),
    ],
    ids=["failure", "bytes"],
)
def test_what_is_under_way_is_broken_off(frames, paths, settings, match):
    start = time.monotonic()
    with pytest.raises(BadRequestError, match=match):
        fetch([frames.server.url(path) for path in paths], **settings)
    assert time.monotonic() - start < 30, "those that stall were broken off"


def test_the_limit_of_bytes_is_inclusive(frames):
    assert fetch([frames.server.url("/frame?50")] * 2, max_video_bytes=100) == (bytes([50]) * 50,) * 2


@pytest.mark.parametrize("bad", ["/error", "data:nonsense"])
def test_the_first_failure_of_a_list_is_told(frames, bad):
    bad = bad if bad.startswith("data:") else frames.server.url(bad)
    match = "HTTP status 500" if bad.startswith("http") else "without a comma"
    for _ in range(3):
        with pytest.raises(BadRequestError, match=match):
            fetch([frames.server.url("/frame?1"), bad, frames.server.url("/missing"), "ftp://x"])


def test_lists_wait_for_memory_as_a_whole(frames):
    """Two lists of which one fits in: neither is left with half of what it needs."""
    frames.server.RequestHandlerClass.get_large = lambda handler, query: handler.answer(200, bytes(2**20 + 1))

    async def scenario():
        settings = FetchSettings(allow_private_media=True, timeout_s=60, memory_mib=6, max_video_bytes=6 * 2**20)
        fetcher = MediaFetcher(settings)
        sources = VideoSources(fetcher, max_frames=12, at_a_time=3)

        async def one():
            with fetcher.claim() as claim:
                return await sources.fetch([frames.server.url("/large")] * 4, claim)

        for fetched in await asyncio.wait_for(asyncio.gather(one(), one(), one()), WAIT_S):
            assert [len(frame) for frame in fetched] == [2**20 + 1] * 4

    asyncio.run(scenario())


class LargeFile(MediaFile):
    modality = None

    def read(self, limit):
        return bytes(2**20 + 1)


@pytest.mark.parametrize("where", ["host", "disk"])
def test_who_waits_for_memory_keeps_no_turn_from_a_list_that_has_it(frames, where):
    frames.server.RequestHandlerClass.get_large = lambda handler, query: handler.answer(200, bytes(2**20 + 1))
    source = LargeFile() if where == "disk" else frames.server.url("/large")

    async def scenario():
        settings = FetchSettings(
            allow_private_media=True, timeout_s=60, memory_mib=6, max_video_bytes=60 * 2**20, max_per_host=8
        )
        fetcher = MediaFetcher(settings)

        async def one():
            with fetcher.claim() as claim:
                return await file_from(source, fetcher, claim)

        with fetcher.claim() as claim:
            sources = VideoSources(fetcher, max_frames=40, at_a_time=1)
            fetched = asyncio.create_task(sources.fetch([source] * 40, claim))
            while not claim.taken:
                await asyncio.sleep(0)
            others = [asyncio.create_task(one()) for _ in range(12)]
            assert len(await asyncio.wait_for(fetched, WAIT_S)) == 40
        for data in await asyncio.wait_for(asyncio.gather(*others), WAIT_S):
            assert len(data) == 2**20 + 1

    asyncio.run(scenario())
