"""POST /v1/warmup: what the scheduler is asked for, the answer, what is refused, and clients that leave."""

from __future__ import annotations

import http.client
import socket

import pytest

from tests.processors.clips import make_clip
from tests.vlmserve.api.fake_engine import MODEL, png_url, real_server
from tests.vlmserve.api.test_embeds_in_chat import TEXT
from tests.vlmserve.api.test_files_in_chat import by_url, refused, upload
from tests.vlmserve.api.test_real_server import post
from vlmserve.ipc.messages import FinishReason

URL = "/v1/warmup"
PLACE = "messages[0].content[0]"


def body(*parts, **fields):
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "<|image_pad|>"}]}], **fields}


def warm(client, *parts, **fields):
    return client.post(URL, json=body(*parts, **fields))


def test_media_are_those_of_a_chat_request_and_every_one_is_answered_for(client, served):
    clip = upload(client, make_clip(8, width=56, height=56), "x.mp4")
    parts = [by_url(), {"type": "video_url", "video_url": {"file_id": clip}, "nframes": 4}]
    answer = warm(client, *parts, mm_processor_kwargs={"min_pixels": 10_000})
    assert answer.status_code == 200, answer.text
    (asked,) = served.scheduler.encodes
    assert answer.json() == {
        "id": asked.rid,
        "object": "warmup",
        "items": [
            {"type": kind, "temporal_patches": t, "encoded": 1, "found": t - 1, "patches_encoded": 24, "saved": None}
            for kind, t in (("image", 1), ("video", 2))
        ],
    }
    chat = {"model": MODEL, "max_tokens": 1, **body(*parts, mm_processor_kwargs={"min_pixels": 10_000})}
    chat["messages"][0]["content"][-1]["text"] = "what"
    assert client.post("/v1/chat/completions", json=chat).status_code == 200
    wanted = served.scheduler.requests[-1].mm_inputs.items
    assert [item.patch_keys for item in asked.items] == [item.patch_keys for item in wanted]
    assert not asked.pin
    assert served.scheduler.aborts == []


def test_text_alone_has_nothing_to_encode(client):
    assert warm(client).json()["items"] == []


@pytest.mark.parametrize(
    ("fields", "status", "param", "code"),
    [
        (body(), 200, None, None),
        ({"messages": []}, 400, "messages", "invalid_value"),
        ({}, 400, "messages", "invalid_value"),
        (body(stream=True), 400, "stream", "invalid_value"),
        (body(pin="yes"), 400, "pin", "invalid_value"),
        (body(pin=True), 400, "pin", "no_embedding_cache"),
        (body(model="other"), 404, "model", "model_not_found"),
        (body(mm_processor_kwargs={"fpss": 1}), 400, "mm_processor_kwargs.fpss", "invalid_value"),
        (body(by_url("data:image/png;base64,AAAA")), 400, PLACE, "invalid_image"),
        (body(by_url("file:///etc/passwd")), 400, PLACE, "invalid_media_url"),
        (body({"type": "image_embeds", "image_embeds": "AAAA"}), 400, PLACE, "unsupported_content"),
        (body(*[by_url()] * 3), 400, "messages", None),
    ],
)
def test_what_is_refused(serve, fields, status, param, code):
    served, client = serve(max_images_per_request=2)
    with client:
        answer = client.post(URL, json=fields)
        if status == 200:
            assert answer.status_code == 200
        else:
            refused(answer, status, param, code)
        served.assert_idle()
    assert not served.scheduler.encodes or status == 200


def test_what_comes_encoded_has_nothing_to_encode(serve):
    _served, client = serve({"enable_mm_embeds": True})
    with client:
        answer = warm(client, {"type": "image_embeds", "image_embeds": TEXT})
        assert "nothing to encode ahead of time" in refused(answer, 400, PLACE, "unsupported_content")


def test_pinning_needs_a_disk_and_bodies_have_a_limit(serve, tmp_path):
    served, client = serve({"embedding_cache_dir": str(tmp_path)}, max_body_mib=0.01, api_key="secret")
    client.headers["Authorization"] = "Bearer secret"
    with client:
        assert warm(client, by_url(), pin=True).status_code == 200
        assert served.scheduler.encodes[0].pin
        assert refused(warm(client, by_url(png_url(size=(2000, 2000)))), 413, None, "body_too_large")
        client.headers.pop("Authorization")
        assert warm(client, by_url()).status_code == 401


@pytest.mark.parametrize(("status", "kind"), [(429, "rate_limit_error"), (500, "server_error")])
def test_errors_of_the_engine(client, served, status, kind):
    served.scheduler.fail_with = FinishReason(type="error", message="no luck", status=status)
    answer = warm(client, by_url())
    assert answer.status_code == status
    assert (answer.json()["error"]["message"], answer.json()["error"]["type"]) == ("no luck", kind)


def test_they_count_as_pending(serve):
    served, _client = serve({"max_running_requests": 1, "max_queued_requests": 1})
    served.scheduler.pause_encodes = True
    with real_server(served.app) as port:
        links = [start(port) for _ in range(2)]
        served.scheduler.wait_until(lambda: len(served.scheduler.encodes) == 2)
        answer = start(port).getresponse()
        assert answer.status == 429
        assert b"--max-queued-requests" in answer.read()
        for link in links:
            link.close()
        served.scheduler.wait_until(lambda: len(served.scheduler.aborts) == 2)


def start(port: int) -> http.client.HTTPConnection:
    return post(port, URL, body(by_url()))


def test_a_client_that_leaves_calls_it_off(served):
    served.scheduler.pause_encodes = True
    with real_server(served.app) as port:
        link = start(port)
        served.scheduler.wait_until(lambda: len(served.scheduler.encodes) == 1)
        link.sock.shutdown(socket.SHUT_RDWR)
        link.close()
        served.scheduler.wait_until(lambda: len(served.scheduler.aborts) == 1)
        assert served.scheduler.aborts[0].rid == served.scheduler.encodes[0].rid
        served.scheduler.pause_encodes = False
        assert start(port).getresponse().status == 200
    served.assert_idle()


def test_an_engine_that_is_gone_answers_503(served):
    served.scheduler.pause_encodes = True
    with real_server(served.app) as port:
        link = start(port)
        served.scheduler.wait_until(lambda: len(served.scheduler.encodes) == 1)
        waiter = next(iter(served.frontend.manager._warmups.values()))
        waiter.get_loop().call_soon_threadsafe(served.frontend.fail_all, "the engine is gone")
        answer = link.getresponse()
        assert answer.status == 503
        assert b"the engine is gone" in answer.read()
        assert start(port).getresponse().status == 503
    served.assert_idle()
