"""Uploaded files in chat requests: pictures and videos by id, whose they are, and what is refused."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import pytest
from PIL import Image

from tests.processors.clips import make_clip
from tests.processors.helpers import encoded
from tests.vlmserve.api.fake_engine import MODEL, Served, png_url, serving
from vlmserve.frontend.chat_messages import with_files
from vlmserve_common.errors import BadRequestError

PNG = base64.b64decode(png_url().split(",")[1])


@pytest.fixture
def served(checkpoint_folder) -> Iterator[Served]:
    with serving(checkpoint_folder, media_max_bytes=100_000) as served:
        yield served


def upload(client, data=PNG, name="x.png") -> str:
    answer = client.post("/v1/files", files={"file": (name, data)}, data={"purpose": "vision"})
    assert answer.status_code == 200
    return answer.json()["id"]


def ask(client, *parts, role="user"):
    content = [*parts, {"type": "text", "text": "what"}]
    body = {"model": MODEL, "messages": [{"role": role, "content": content}], "max_tokens": 2, "temperature": 0}
    return client.post("/v1/chat/completions", json=body)


def media_of(served, client, *parts):
    """What the scheduler is given for these parts."""
    answer = ask(client, *parts)
    assert answer.status_code == 200, answer.json()
    return served.scheduler.requests[-1].mm_inputs.items


def refused(response, status, param, code=None):
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), error
    assert code is None or error["code"] == code
    return error["message"]


def by_url(url=None):
    return {"type": "image_url", "image_url": {"url": url or png_url()}}


def test_a_picture_by_id_is_the_picture(client, served):
    name = upload(client)
    (expected,) = media_of(served, client, by_url())
    for part in (
        {"type": "file", "file": {"file_id": name}},
        {"type": "image_url", "image_url": {"file_id": name}},
        {"type": "image_url", "image_url": {"file_id": name, "detail": "auto"}},
    ):
        (item,) = media_of(served, client, part)
        assert item.patch_keys == expected.patch_keys


def test_what_stands_beside_an_id_counts(client, served):
    name = upload(client, base64.b64decode(png_url(size=(224, 224)).split(",")[1]))
    (whole,) = media_of(served, client, {"type": "image_url", "image_url": {"file_id": name}})
    (small,) = media_of(served, client, {"type": "image_url", "image_url": {"file_id": name}, "max_pixels": 56 * 56})
    assert (whole.grid_thw, small.grid_thw) == ((1, 16, 16), (1, 4, 4))


def test_a_video_by_id_is_the_video(client, served):
    clip = make_clip(8, width=56, height=56)
    name = upload(client, clip, "x.mp4")
    url = "data:video/mp4;base64," + base64.b64encode(clip).decode()
    (expected,) = media_of(served, client, {"type": "video_url", "video_url": {"url": url}})
    for part in (
        {"type": "file", "file": {"file_id": name}},
        {"type": "video_url", "video_url": {"file_id": name}},
    ):
        (item,) = media_of(served, client, part)
        assert item.patch_keys == expected.patch_keys
    (fewer,) = media_of(served, client, {"type": "video_url", "video_url": {"file_id": name}, "nframes": 2})
    assert fewer.grid_thw[0] < expected.grid_thw[0]


def test_an_animation_is_a_picture_or_a_video_as_it_is_asked_for(client, served):
    first, *others = (Image.new("RGB", (56, 56), (60 * n, 0, 0)) for n in range(4))
    name = upload(client, encoded(first, "GIF", save_all=True, append_images=others, duration=500))
    (item,) = media_of(served, client, {"type": "file", "file": {"file_id": name}})
    assert item.modality == "image"
    (item,) = media_of(served, client, {"type": "video_url", "video_url": {"file_id": name}})
    assert item.modality == "video"


def test_several_files_and_urls_in_their_order(client, served):
    red, blue = png_url((255, 0, 0)), png_url((0, 0, 255))
    names = [upload(client, base64.b64decode(url.split(",")[1])) for url in (red, blue)]
    expected = [item.digest for item in media_of(served, client, by_url(red), by_url(blue), by_url(), by_url(red))]
    parts = ({"type": "file", "file": {"file_id": name}} for name in names)
    again = media_of(served, client, *parts, by_url(), {"type": "image_url", "image_url": {"file_id": names[0]}})
    assert [item.digest for item in again] == expected


def test_frames_by_id_are_those_frames(client, served):
    """Among others, in their order."""
    red, blue = png_url((255, 0, 0)), png_url((0, 0, 255))
    names = [upload(client, base64.b64decode(url.split(",")[1])) for url in (red, blue)]
    (expected,) = media_of(served, client, {"type": "video", "video": [red, png_url(), blue]})
    mixed = [{"file_id": names[0]}, png_url(), {"file_id": names[1]}]
    (item,) = media_of(served, client, {"type": "video", "video": mixed, "fps": 2})
    assert item.patch_keys == expected.patch_keys


def test_frames_by_id_that_are_refused(client):
    name, gone = upload(client), upload(client)
    assert client.delete(f"/v1/files/{gone}").status_code == 200
    place = "messages[0].content[0].video"

    def refuse(frame, status, param, code=None):
        return refused(ask(client, {"type": "video", "video": [{"file_id": name}, frame]}), status, param, code)

    refuse({"file_id": gone}, 404, f"{place}[1].file_id", "file_not_found")
    assert "url is not a known field" in refuse({"file_id": name, "url": png_url()}, 400, f"{place}[1].url")
    assert "file_id is missing" in refuse({}, 400, f"{place}[1].file_id")
    assert "must be a URL, or an object with a file_id" in refuse(5, 400, f"{place}[1]")
    refuse({"file_id": 5}, 400, f"{place}[1].file_id")
    text, large = upload(client, b"some text"), upload(client, PNG + bytes(100_000))
    assert "frame 1 of the video: " in refuse({"file_id": text}, 400, "messages[0].content[0]", "invalid_image")
    assert "the limit is 100000" in refuse({"file_id": large}, 400, "messages[0].content[0]")


def test_a_file_that_is_not_there(client):
    name = "file-" + "0" * 32
    place = "messages[0].content[0]"
    refused(ask(client, {"type": "file", "file": {"file_id": name}}), 404, f"{place}.file.file_id", "file_not_found")
    part = {"type": "image_url", "image_url": {"file_id": name}}
    assert name in refused(ask(client, part), 404, f"{place}.image_url.file_id", "file_not_found")
    gone = upload(client)
    assert client.delete(f"/v1/files/{gone}").status_code == 200
    refused(ask(client, {"type": "video_url", "video_url": {"file_id": gone}}), 404, f"{place}.video_url.file_id")


@pytest.mark.parametrize("data", [b"%PDF-1.7", b"some text", b""])
def test_a_file_that_is_no_medium(client, data):
    name = upload(client, data)
    message = refused(
        ask(client, {"type": "file", "file": {"file_id": name}}),
        400,
        "messages[0].content[0].file.file_id",
        "unsupported_content",
    )
    assert "neither a picture nor a video" in message
    part = {"type": "image_url", "image_url": {"file_id": name}}
    refused(ask(client, part), 400, "messages[0].content[0]", "invalid_image")


def test_a_file_over_the_limit_of_pictures(client):
    name = upload(client, PNG + bytes(100_000))
    message = refused(ask(client, {"type": "file", "file": {"file_id": name}}), 400, "messages[0].content[0]")
    assert f"{len(PNG) + 100_000} bytes, the limit is 100000 (setting --media-max-bytes)" in message


def test_shapes_that_are_refused(client):
    name = upload(client)
    place = "messages[0].content[0]"

    def refuse(kind, value, param, code=None, **more):
        return refused(ask(client, {"type": kind, kind: value}, **more), 400, param, code)

    for value in ({"filename": "x"}, {"file_data": png_url()}):
        refuse("file", value, f"{place}.file", "unsupported_content")
    refuse("image_url", {}, f"{place}.image_url")
    both = {"file_id": name, "url": png_url()}
    assert "either a url or a file_id" in refuse("image_url", both, f"{place}.image_url")
    refuse("image_url", {"file_id": 5}, f"{place}.image_url.file_id")
    assert "belongs into file_id" in refuse("image_url", {"url": name}, place, "invalid_media_url")
    refuse("file", {"file_id": name}, f"{place}.type", role="system")


def test_without_a_server_there_are_no_files():
    part = {"type": "file", "file": {"file_id": "file-x"}}
    with pytest.raises(BadRequestError, match="there are no uploaded files") as caught:
        with_files([{"role": "user", "content": [part]}], None)
    assert caught.value.param == "messages[0].content[0].file.file_id"
