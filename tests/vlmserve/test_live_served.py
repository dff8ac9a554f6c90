"""Sessions and live video of a real server: pictures are named, and not sent again, and answers stay the same."""

import base64
import io
import struct

import pytest
from websockets.sync.client import connect

from tests.tiny_checkpoints import ALL_FAMILIES, make_checkpoint
from tests.vlmserve.reference import picture
from tests.vlmserve.server_process import SAMPLES, data_url, serving

OPTIONS = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": True}


def png(seed):
    file = io.BytesIO()
    picture(seed, 96, 64).save(file, "PNG")
    return file.getvalue()


def said(answer):
    status, body = answer
    assert status == 200, body
    return [(one["token"], round(one["logprob"], 4)) for one in body["choices"][0]["logprobs"]["content"]]


def image(name):
    return {"type": "image_url", "image_url": {"url": data_url(SAMPLES / name)}}


def test_pictures_of_a_session_are_encoded_again_where_nothing_is_cached(shared_server):
    """From patches that the session holds, and requests name."""
    session = shared_server.post("v1/sessions")[1]["id"]
    for name in ("shapes.png", "receipt.png"):
        assert shared_server.post(f"v1/sessions/{session}/append", content=[image(name)])[0] == 200
    question = {
        "role": "user",
        "content": [image("shapes.png"), image("receipt.png"), {"type": "text", "text": "Why?"}],
    }
    whole = said(shared_server.post("v1/chat/completions", messages=[question], **OPTIONS))
    for _ in range(2):
        assert said(shared_server.post(f"v1/sessions/{session}/ask", content="Why?", keep=False, **OPTIONS)) == whole
        assert shared_server.post("flush_cache")[0] == 200
    assert shared_server._ask("DELETE", f"v1/sessions/{session}")[0] == 200


def test_frames_are_answered_as_a_chat_with_all_of_them(shared_server):
    check_frames(shared_server)


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--dp-size 2", "--tp-size 2 --speculative-algorithm ngram", "--pp-size 2"])
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_frames_of_servers_of_several_processes(family, flags, tmp_path):
    """With chunks of a few tokens. A session stays with its replica."""
    folder = make_checkpoint(family, tmp_path / "model")
    words = "--chunked-prefill-size 16 --page-size 4 --dtype float32"
    with serving(tmp_path / "run", *flags.split(), *words.split(), model=folder) as server:
        check_frames(server)
        check_frames(server)


def check_frames(server):
    session = server.post("v1/sessions", live={"fps": 2})[1]["id"]
    frames = [png(seed) for seed in range(5)]
    with connect(f"ws://127.0.0.1:{server.port()}/v1/sessions/{session}/frames") as socket:
        for place, frame in enumerate(frames):
            socket.send(struct.pack("<Bd", 1, place / 2) + frame)
        for _ in range(2):
            asked = said(server.post(f"v1/sessions/{session}/ask", content="Why?", keep=False, **OPTIONS))
            urls = [f"data:image/png;base64,{base64.b64encode(frame).decode()}" for frame in frames]
            video = {"type": "video", "video": urls, "sample_fps": 2}
            size = asked_size(server, session)
            question = {"role": "user", "content": [{**video, **size}, {"type": "text", "text": "Why?"}]}
            assert asked == said(server.post("v1/chat/completions", messages=[question], **OPTIONS))
            assert server.post("flush_cache")[0] == 200
    assert server._ask("DELETE", f"v1/sessions/{session}")[0] == 200


def asked_size(server, session):
    """The size that the session's frames were given, as a request asks for it."""
    status, body = server.post(
        f"v1/sessions/{session}/ask", content="Why?", keep=False, return_mm_report=True, max_tokens=1
    )
    assert status == 200, body
    size = body["mm_report"]["media"][0]["final_size"]
    return {"resized_width": size["width"], "resized_height": size["height"]}
