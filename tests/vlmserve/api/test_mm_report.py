"""What the answer says about its media: asked for or not, whole and streamed; and what becomes of a request's knobs."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.processors.clips import make_clip
from tests.processors.fake_embedder import fake_embedder
from tests.processors.test_sampling_by_question import coloured
from tests.vlmserve.api.fake_engine import CHAT, MODEL, Served, png_url, serving
from tests.vlmserve.api.test_generation import stream

PICTURE = png_url(size=(300, 200))
TOKEN = 28 * 28
LIMIT = 50176  # the checkpoint's
CLIP = "data:video/mp4;base64," + base64.b64encode(make_clip(30, width=320, height=200)).decode()


@pytest.fixture(scope="module")
def served(checkpoint_folder: Path) -> Iterator[Served]:
    with serving(checkpoint_folder, {"low_detail_tokens": 16}) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[TestClient]:
    with TestClient(served.app, raise_server_exceptions=False) as client:
        yield client


def image(url: str = PICTURE, detail: str | None = None, **knobs: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url} | ({"detail": detail} if detail else {}), **knobs}


def body(*parts: Any, **fields: Any) -> dict[str, Any]:
    content = [*parts, {"type": "text", "text": "What?"}]
    return {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": content}], **fields}


def answer(client: TestClient, *parts: Any, **fields: Any) -> dict[str, Any]:
    reply = client.post(CHAT, json=body(*parts, **fields))
    assert reply.status_code == 200, reply.text
    return reply.json()


def events(client: TestClient, *parts: Any, **fields: Any) -> list[dict[str, Any]]:
    return stream(client, **body(*parts, **fields))


def report(client: TestClient, *parts: Any, **fields: Any) -> list[dict[str, Any]]:
    return answer(client, *parts, return_mm_report=True, **fields)["mm_report"]["media"]


def refused(client: TestClient, *parts: Any, **fields: Any) -> dict[str, Any]:
    reply = client.post(CHAT, json=body(*parts, **fields))
    assert reply.status_code == 400, reply.text
    return reply.json()["error"]


def test_a_pictures_report(client):
    (medium,) = report(client, image())
    assert medium == {
        "kind": "image",
        "param": "messages[0].content[0]",
        "source_size": {"width": 300, "height": 200},
        "final_size": {"width": 252, "height": 168},
        "grid_thw": [1, 12, 18],
        "tokens": 54,
        "scale": {"x": 300 / 252, "y": 200 / 168},
        "coordinates": "0-1000",
        "clamps": [],
        "ignored": [],
        "video": None,
        "audio": None,
        "pruning": None,
    }


def test_what_leaves_a_medium_is_told(client):
    white = image(png_url(size=(300, 200)), skip_repeats=True)
    [medium] = report(client, white)
    assert medium["pruning"] == {
        "repeats": 54 - medium["tokens"],
        "before_tower": 54 - medium["tokens"],
        "unchanged": 0,
        "video_pruning_rate": 0,
        "tokens_of_patches": [medium["tokens"]],
    }
    clip = {"type": "video", "video": CLIP}
    [whole] = report(client, clip)
    fields = {
        "mm_processor_kwargs": {"video_pruning_rate": 0.5},
        "return_usage_details": True,
        "return_mm_report": True,
    }
    got = answer(client, clip, **fields)
    [fewer] = got["mm_report"]["media"]
    details = got["usage"]["prompt_tokens_details"]
    assert fewer["tokens"] == whole["tokens"] // 2 == details["video_tokens"]
    assert fewer["pruning"]["unchanged"] == details["pruned_tokens"] == whole["tokens"] - fewer["tokens"]
    assert (fewer["scale"], fewer["grid_thw"]) == (whole["scale"], whole["grid_thw"])
    assert "pruned_tokens" not in answer(client, clip, return_usage_details=True)["usage"]["prompt_tokens_details"]


@pytest.mark.parametrize(
    ("part", "word"),
    [
        ({"skip_repeats": "yes"}, "skip_repeats"),
        ({"video_pruning_rate": 1}, "video_pruning_rate"),
        ({"sampling": "smart"}, "sampling"),
    ],
)
def test_what_cannot_leave_is_refused(client, part, word):
    assert word in str(refused(client, {"type": "video", "video": CLIP, **part}))


def test_media_are_in_prompt_order(client):
    first, second, third = report(
        client, image(png_url(size=(56, 84))), {"type": "video", "video": CLIP}, image(max_pixels=TOKEN)
    )
    assert [medium["kind"] for medium in (first, second, third)] == ["image", "video", "image"]
    assert first["source_size"] == {"width": 56, "height": 84}
    assert third["param"] == "messages[0].content[2]"
    video = second["video"]
    assert (video["source_fps"], video["source_frames"], video["source_duration_s"]) == (10, 30, 3)
    assert (video["sampling"], video["sample_fps"]) == ("transformers", 2)
    assert video["frame_indices"] == [0, 5, 10, 15, 20, 25]
    assert video["timestamps"] == [0, 0.5, 1, 1.5, 2, 2.5]
    assert video["patch_timestamps"] == [0.25, 1.25, 2.25]
    assert second["grid_thw"][0] == 3
    assert second["tokens"] == 3 * second["grid_thw"][1] * second["grid_thw"][2] // 4
    assert second["final_size"] == {"width": 14 * second["grid_thw"][2], "height": 14 * second["grid_thw"][1]}


def test_tokens_are_those_of_the_prompt(client):
    bare = answer(client)["usage"]["prompt_tokens"]
    media = report(client, image(), image(max_pixels=9 * TOKEN))
    whole = answer(client, image(), image(max_pixels=9 * TOKEN))["usage"]["prompt_tokens"]
    # besides pads, a pair of markers each
    assert whole == bare + sum(medium["tokens"] + 2 for medium in media)


def test_who_does_not_ask_gets_none(client):
    assert set(answer(client, image())) == set(answer(client)) == {*answer(client)} - {"mm_report", "warnings"}
    assert answer(client, return_mm_report=True)["mm_report"] == {"media": []}
    assert "mm_report" not in answer(client, image(), return_mm_report=False)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("usage", [False, True])
def test_a_stream_has_it_in_its_last_event(client, n, usage):
    options = {"stream_options": {"include_usage": True}} if usage else {}
    got = events(client, image(max_pixels=10**6), n=n, return_mm_report=True, **options)
    assert 0 < got[-1]["timings"]["prepare_s"] <= got[-1]["timings"]["first_token_s"]
    assert [("mm_report" in event, "warnings" in event) for event in got] == [(False, False)] * (len(got) - 1) + [
        (True, True)
    ]
    assert got[-1]["mm_report"]["media"] == report(client, image(max_pixels=10**6))
    assert bool(got[-1]["choices"]) != usage
    assert not any("mm_report" in event for event in events(client, image(), n=n, **options))


# ---------------------------------------------------------------- knobs


def tokens(client: TestClient, *parts: Any, **fields: Any) -> list[int]:
    return [medium["tokens"] for medium in report(client, *parts, **fields)]


BIG = png_url(size=(1680, 1680))


def test_precedence(client):
    """part > detail > mm_processor_kwargs > checkpoint"""
    kwargs = {"mm_processor_kwargs": {"max_pixels": 25 * TOKEN}}
    details = [image(BIG, detail) for detail in (None, "auto", "low", "high")]
    own = [image(BIG, detail, max_pixels=area * TOKEN) for detail, area in ((None, 9), ("low", 9), ("low", 36))]
    own.append({"type": "image", "image": BIG, "max_pixels": 4 * TOKEN})
    assert tokens(client, *details) == [64, 64, 16, 64]
    assert tokens(client, *details, **kwargs) == [25, 25, 16, 64]
    assert tokens(client, *own) == tokens(client, *own, **kwargs) == [9, 9, 36, 4]


def test_kwargs_reach_videos(client):
    video = {"type": "video_url", "video_url": {"url": CLIP}}
    plain, sized, few, own = (
        report(client, part, mm_processor_kwargs=kwargs)[0]
        for part, kwargs in (
            (video, {}),
            (video, {"size": {"shortest_edge": TOKEN, "longest_edge": 4 * TOKEN}}),
            (video, {"num_frames": 4}),
            (video | {"nframes": 2}, {"fps": 5, "max_pixels": 4 * TOKEN}),
        )
    )
    assert sized["tokens"] < plain["tokens"]
    assert few["video"]["frame_indices"] == [0, 7, 15, 22]
    assert own["video"]["frame_indices"] == [0, 15]
    assert own["tokens"] <= 4


# ---------------------------------------------------------------- sampling by the question


def test_a_question_chooses_frames(checkpoint_folder):
    clip = coloured((60, 70, (220, 20, 20)))
    url = "data:video/mp4;base64," + base64.b64encode(clip).decode()
    video = {"type": "video_url", "video_url": {"url": url}, "nframes": 16, "sampling": "question", "max_pixels": 784}
    with (
        fake_embedder() as embedder,
        serving(checkpoint_folder, {"embedder_url": embedder.url + "/", "embedder_model": "colours"}) as served,
        TestClient(served.app, raise_server_exceptions=False) as client,
    ):
        content = [video, {"type": "text", "text": "When is it red?"}]
        asked = body(return_mm_report=True, messages=[{"role": "user", "content": content}])
        reply = client.post(CHAT, json=asked).json()
        assert "warnings" not in reply, reply
        found = reply["mm_report"]["media"][0]["video"]
        assert found["sampling"] == "question"
        assert sum(58 <= at < 72 for at in found["timestamps"]) >= 10
        assert embedder.asked == ["When is it red?"]
        embedder.answers = (503, b"")
        content[1]["text"] = "When is it green?"
        reply = client.post(CHAT, json=asked).json()
        found = reply["mm_report"]["media"][0]["video"]
        assert (found["sampling"], found["fallback"]) == (
            "adaptive",
            "the server of embeddings answers with HTTP status 503",
        )
        assert reply["warnings"] == [
            "messages[0].content[0]: frames were chosen by changes, not by the question: the server of embeddings "
            "answers with HTTP status 503"
        ]


def test_without_an_embedder_a_question_is_refused(client):
    error = refused(client, {"type": "video_url", "video_url": {"url": CLIP}, "sampling": "question"})
    assert error["param"] == "messages[0].content[0]"
    assert "--embedder-url" in error["message"]


# ---------------------------------------------------------------- clamps


def test_a_clamp_is_told_whoever_asks(client):
    answered = answer(client, image(), image(BIG, max_pixels=10**6))
    said = f"max_pixels 1000000 was changed to {LIMIT}, the limit is {LIMIT} (setting --max-pixels)"
    assert answered["warnings"] == [f"messages[0].content[1]: {said}"]
    (medium,) = report(client, image(BIG), mm_processor_kwargs={"max_pixels": 10**6})
    assert medium["clamps"] == [
        {"knob": "max_pixels", "asked": 10**6, "used": LIMIT, "limit": LIMIT, "setting": "setting --max-pixels"}
    ]
    assert medium["tokens"] == 64


def test_a_knob_without_effect_is_told(client):
    part = {"type": "video", "video": [png_url(), png_url()], "nframes": 4}
    assert answer(client, part)["warnings"] == ["messages[0].content[0]: nframes has no effect on this video"]
    assert report(client, part)[0]["video"]["sampling"] == "list"


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("part", "param"),
    [
        (image(max_pixels=0), "messages[0].content[0]"),
        (image(max_pixels=True), "messages[0].content[0].max_pixels"),
        (image(min_pixels=9, max_pixels=8), "messages[0].content[0]"),
        (image(resized_height=100), "messages[0].content[0]"),
        (image(resized_height=28, resized_width=28 * 300), "messages[0].content[0]"),
        (image(detail="medium"), "messages[0].content[0].image_url.detail"),
        (image(fps=2), "messages[0].content[0].fps"),
        ({"type": "video", "video": CLIP, "fps": 0}, "messages[0].content[0]"),
    ],
    ids=str,
)
def test_bad_knobs_of_a_part(client, part, param):
    assert refused(client, part)["param"] == param


@pytest.mark.parametrize(
    ("kwargs", "param"),
    [
        ({"max_pixel": 9}, "mm_processor_kwargs.max_pixel"),
        ({"do_sample_frames": "yes"}, "mm_processor_kwargs.do_sample_frames"),
        ([1], "mm_processor_kwargs"),
    ],
    ids=str,
)
def test_bad_kwargs_are_refused_with_and_without_media(client, kwargs, param):
    for parts in ((), (image(),)):
        assert refused(client, *parts, mm_processor_kwargs=kwargs)["param"] == param


def test_knobs_are_checked_before_anything_is_fetched(client):
    assert "min_pixels is 0" in refused(client, image("http://127.0.0.1:1/x.png", min_pixels=0))["message"]
