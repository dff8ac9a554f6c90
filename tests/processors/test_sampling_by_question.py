"""Sampling by a question: frames near to it, what the embedder is asked, and what happens if it fails."""

from __future__ import annotations

import asyncio
import io
import threading
import time

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from processors.families.report import report_medium
from processors.fetch.embedder import Embedder
from processors.fetch.fetching import MediaFetcher
from processors.fetch.limits import FetchSettings
from processors.pool.pool import PoolSettings, ProcessorPool
from processors.pool.requests import VideoRequest
from processors.video.adaptive import MOST_LOOKS, spread_near
from processors.video.options import Focus, VideoKnobs
from tests import hf_env  # noqa: F401
from tests.processors.clips import make_clip
from tests.processors.fake_embedder import fake_embedder
from tests.processors.helpers import noise, tiny_processor
from vlmserve_common.errors import BadRequestError


def coloured(*parts: tuple[int, int, tuple[int, int, int]], seconds: int = 300, fps: int = 2) -> bytes:
    """Grey that changes all the time, but for seconds [start, end) of a colour."""
    file, shapes = io.BytesIO(), noise(320, 160)[..., :1] // 16
    with av.open(file, "w", format="mp4") as box:
        stream = box.add_stream("libx264", rate=fps, options={"preset": "ultrafast", "g": "10"})
        stream.width, stream.height, stream.pix_fmt = 320, 160, "yuv420p"
        for number in range(seconds * fps):
            second = number / fps
            colour = next((rgb for start, end, rgb in parts if start <= second < end), (120, 120, 120))
            picture = np.full((160, 320, 3), colour, np.uint8) + shapes * np.uint8(number % 3)
            box.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        box.mux(stream.encode())
    return file.getvalue()


@pytest.fixture(scope="module")
def clip():
    return coloured((60, 70, (220, 20, 20)), (200, 204, (20, 20, 220)))


@pytest.fixture(scope="module")
def processor(tmp_path_factory):
    return tiny_processor(tmp_path_factory.mktemp("qwen3_vl"), "qwen3_vl", max_pixels=64 * 64)


@pytest.fixture
def embedder():
    with fake_embedder() as embedder:
        yield embedder


@pytest.fixture
def make_pool(processor, embedder):
    pools = []

    def make(url=None, timeout_s=20.0, api_key=None):
        client = Embedder(url or embedder.url, model=None, api_key=api_key, timeout_s=timeout_s)
        pools.append(ProcessorPool(processor, MediaFetcher(FetchSettings()), PoolSettings(), embedder=client))
        return pools[-1]

    yield make
    for pool in pools:
        asyncio.run(pool.close())


def by(question, **knobs):
    return VideoKnobs(sampling="question", num_frames=16, focus=Focus(question=question), **knobs)


def load(pool, clip, knobs):
    [video] = asyncio.run(pool.load([VideoRequest(source=clip, knobs=knobs)]))
    return video


def inside(video, start, end):
    return sum(start <= at < end for at in video.frame_times)


def test_frames_go_where_the_question_is_answered(make_pool, embedder, processor, clip):
    pool = make_pool(api_key="secret")
    red, blue = (load(pool, clip, by(f"When is it {colour}?")) for colour in ("red", "blue"))
    plain = load(pool, clip, VideoKnobs(num_frames=16))
    assert [inside(one, 58, 72) for one in (plain, red, blue)] == [1, 10, 0]
    assert inside(blue, 196, 208) >= 10
    assert {len(one.frame_times) for one in (plain, red, blue)} == {16}
    assert red.frame_times[0] < 60
    assert red.frame_times[-1] > 200
    assert list(red.frame_indices) == sorted(set(red.frame_indices))
    report = report_medium(processor, red, "").as_json()["video"]
    assert (report["sampling"], report["fallback"], report["scene_changes"]) == ("question", "", ())
    assert all(60 <= at < 70 for at in report["nearest"][:2])
    assert 60 <= report["probes"] <= MOST_LOOKS
    assert len(embedder.pictures) == 2 * report["probes"], "each frame once for each question"
    assert set(embedder.pictures) == {(256, 128)}
    assert embedder.asked == ["When is it red?", "When is it blue?"]
    assert embedder.given["Authorization"] == "Bearer secret"
    assert load(pool, clip, by("When is it red?")) is red
    assert len(embedder.asked) == 2


def test_a_part_of_a_clip(make_pool, clip):
    video = load(make_pool(), clip, by("red", video_start=100, video_end=250))
    assert 100 <= video.frame_times[0] <= video.frame_times[-1] <= 250


def test_all_frames_stay_where_there_are_no_more(make_pool, embedder):
    video = load(make_pool(), make_clip(12), by("red"))
    assert (len(video.frame_times), video.sampling, video.fallback) == (16, "transformers", "")
    assert embedder.pictures == []


ENDLESS = b'{"data": [{"embedding": [1e400]}]}'
HUGE = b'{"data": [{"embedding": [1' + b"0" * 400 + b"]}]}"


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        ((500, b"no"), "the server of embeddings answers with HTTP status 500"),
        ((200, b"no"), "the server of embeddings does not answer as OpenAI's API does"),
        ((200, b'{"data": []}'), "the server of embeddings does not answer as OpenAI's API does"),
        ((200, b'{"data": [{"embedding": ["a"]}]}'), "the server of embeddings does not answer as OpenAI's API does"),
        ((200, b'{"data": [{"embedding": []}]}'), "the server of embeddings does not answer as OpenAI's API does"),
        ((200, ENDLESS), "the server of embeddings does not answer as OpenAI's API does"),
        ((200, HUGE), "the server of embeddings does not answer as OpenAI's API does"),
    ],
)
def test_changes_choose_frames_if_the_embedder_fails(make_pool, embedder, processor, clip, answers, told):
    pool = make_pool()
    embedder.answers = answers
    video = load(pool, clip, by("red"))
    assert (video.sampling, video.fallback) == ("adaptive", told)
    assert video.frame_indices == load(pool, clip, VideoKnobs(sampling="adaptive", num_frames=16)).frame_indices
    report = report_medium(processor, video, "messages[0]")
    assert report.warnings() == [f"messages[0]: frames were chosen by changes, not by the question: {told}"]
    embedder.answers = None
    assert load(pool, clip, by("red")).sampling == "question", "no failure is kept"


def test_an_embedder_may_start_again_with_another_model(make_pool, embedder, clip):
    pool = make_pool()
    assert load(pool, clip, by("red")).sampling == "question"
    embedder.model = "more colours"
    assert load(pool, clip, by("blue")).sampling == "question"


def test_an_embedder_that_is_slow_is_left_alone_for_a_while(make_pool, embedder, clip, monkeypatch):
    pool = make_pool(timeout_s=0.3)
    embedder.held = threading.Event()
    began = time.monotonic()
    told = load(pool, clip, by("red")).fallback
    assert told == "the server of embeddings did not answer within 0.3 s (setting --embedder-timeout-s)"
    assert load(pool, clip, by("blue")).fallback == "the server of embeddings did not answer a moment ago"
    assert time.monotonic() - began < 10
    embedder.held.set()
    monkeypatch.setattr(pool._embedder, "_asked_from", 0.0)  # ten seconds later
    pool._embedder._timeout_s = 20.0
    assert load(pool, clip, by("blue")).sampling == "question"


def test_an_embedder_that_is_not_there(make_pool, clip):
    assert load(make_pool("http://127.0.0.1:1/v1"), clip, by("red")).fallback == (
        "the server of embeddings cannot be reached"
    )


def test_a_request_that_is_cancelled_calls_the_question_off(make_pool, embedder, clip):
    pool, embedder.held = make_pool(), threading.Event()

    async def leave():
        loading = asyncio.create_task(pool.load([VideoRequest(source=clip, knobs=by("red"))]))
        assert await asyncio.to_thread(embedder.arrived.wait, 20)
        loading.cancel()
        await asyncio.wait([loading])
        assert loading.cancelled()
        assert pool.in_pool == 0
        assert pool._looking._value == 8

    asyncio.run(leave())


def test_without_a_text_or_an_embedder(make_pool, embedder, processor, clip):
    pool = make_pool()
    videos = [load(pool, clip, by("")) for _ in range(2)]
    assert videos[0].fallback == "there is no text beside the video"
    assert videos[1] is videos[0]
    assert embedder.asked == []
    bare = ProcessorPool(processor, MediaFetcher(FetchSettings()), PoolSettings())
    with pytest.raises(BadRequestError, match="knows none \\(setting --embedder-url\\)"):
        load(bare, clip, by("red"))
    asyncio.run(bare.close())


@given(st.data())
def test_frames_are_different_and_inside(data):
    first, total = data.draw(st.integers(0, 50)), data.draw(st.integers(2, 400))
    count = data.draw(st.integers(1, total - 1))
    places = data.draw(st.sets(st.integers(first, first + total - 1), min_size=1, max_size=40).map(sorted))
    near = np.array(data.draw(st.lists(st.floats(-1, 1), min_size=len(places), max_size=len(places))))
    found = spread_near(places, near, first, total, count)
    assert len(found) == count
    assert list(found) == sorted(set(found))
    assert first <= found[0]
    assert found[-1] < first + total


def test_without_differences_frames_are_spread_evenly():
    steps = np.diff(spread_near([5, 15, 25], np.zeros(3), 0, 30, 10))
    assert set(steps.tolist()) == {3}
