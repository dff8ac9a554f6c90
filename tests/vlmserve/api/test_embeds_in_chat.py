"""Pictures that come encoded, over HTTP: the ways to send them, what the scheduler gets, and what is refused."""

from __future__ import annotations

import base64
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from safetensors.torch import save

from tests.vlmserve.api.fake_engine import ROW_WIDTH, Served, serving
from tests.vlmserve.api.test_files_in_chat import ask, media_of, refused, upload
from vlmserve.ipc.messages import TokenizedGenerateReqInput
from vlmserve_common.transport.wire import WireCodec

PLACE = "messages[0].content[0]"
ROWS = torch.randn(6, ROW_WIDTH, generator=torch.Generator().manual_seed(0))
DATA = save({"image_embeds": ROWS, "image_grid_thw": torch.tensor([[1, 4, 6]])})
TEXT = base64.b64encode(DATA).decode()


@pytest.fixture
def served(checkpoint_folder) -> Iterator[Served]:
    with serving(checkpoint_folder, {"enable_mm_embeds": True}, media_max_bytes=10_000) as served:
        yield served


def embeds(value):
    return {"type": "image_embeds", "image_embeds": value}


def test_the_ways_to_send_them(client, served):
    url = f"data:application/octet-stream;base64,{TEXT}"
    keys = set()
    for value in (TEXT, {"data": TEXT}, {"url": url}, {"file_id": upload(client, DATA, "rows.safetensors")}):
        (item,) = media_of(served, client, embeds(value))
        assert (item.modality, item.grid_thw, item.encoded) == ("image", (1, 4, 6), True)
        assert np.array_equal(item.feature, ROWS.numpy())
        ((start, end),) = item.offsets
        assert end - start == 6
        keys.add(tuple(item.patch_keys))
    assert len(keys) == 1


def test_the_ways_to_send_a_videos(client, served):
    data = save({"video_embeds": ROWS, "video_grid_thw": torch.tensor([[2, 2, 6]])})
    text = base64.b64encode(data).decode()
    for value in (text, {"data": text}, {"file_id": upload(client, data, "rows.safetensors")}):
        (item,) = media_of(served, client, {"type": "video_embeds", "video_embeds": value})
        assert (item.modality, item.grid_thw, item.encoded) == ("video", (2, 2, 6), True)
        assert len(item.patch_digests) == 2
        assert item.num_tokens == 6
    refused(ask(client, embeds(text)), 400, PLACE, "invalid_image_embeds")
    refused(ask(client, {"type": "video_embeds", "video_embeds": TEXT}), 400, PLACE, "invalid_video_embeds")


def test_they_reach_another_process_as_they_are(client, served):
    media_of(served, client, embeds(TEXT))
    message = served.scheduler.requests[-1]
    codec = WireCodec([TokenizedGenerateReqInput])
    there = codec.decode(codec.encode(message))
    (item,) = there.mm_inputs.items
    assert item.encoded
    assert np.array_equal(item.feature, ROWS.numpy())


def test_what_is_refused(client):
    small = save({"image_embeds": ROWS[:5], "image_grid_thw": torch.tensor([[1, 4, 6]])})
    message = refused(ask(client, embeds(base64.b64encode(small).decode())), 400, PLACE, "invalid_image_embeds")
    assert f"float32 [5, {ROW_WIDTH}]" in message
    assert f"[6, {ROW_WIDTH}]" in message
    large = base64.b64encode(bytes(10_001)).decode()
    message = refused(ask(client, embeds(large)), 400, PLACE, "invalid_media_url")
    assert "10001 bytes, the limit is 10000 (setting --media-max-bytes)" in message
    for value in ("no base64!", {"url": "file:///etc/passwd"}):
        refused(ask(client, embeds(value)), 400, PLACE, "invalid_media_url")
    for part in (embeds({"data": TEXT, "url": "x"}), embeds({}), embeds(5), {"type": "image_embeds"}):
        refused(ask(client, part), 400, f"{PLACE}.image_embeds", "invalid_value")
    refused(ask(client, embeds({"file_id": "file-x"})), 404, f"{PLACE}.image_embeds.file_id", "file_not_found")


def test_off_unless_asked_for(serve):
    _served, client = serve()
    with client:
        message = refused(ask(client, embeds(TEXT)), 400, PLACE, "unsupported_content")
        assert "setting --enable-mm-embeds" in message
        message = refused(ask(client, embeds({"url": "http://127.0.0.1:1/x"})), 400, PLACE, "unsupported_content")
        assert "setting --enable-mm-embeds" in message, "nothing is fetched"
