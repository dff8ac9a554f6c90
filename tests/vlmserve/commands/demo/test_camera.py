"""The page's camera: which frames go to the server, and when it is asked."""

import asyncio

import numpy as np
import pytest

from tests.vlmserve.api.fake_engine import MODEL
from tests.vlmserve.commands.served import fake_server
from vlmserve.commands.client.chat_client import ChatClient

pytest.importorskip("gradio")
from vlmserve.commands.demo.camera import Watch


def frame(number):
    return np.random.default_rng(number).integers(0, 256, (28, 56, 3), dtype=np.uint8)


def test_a_camera_is_asked_about_again_and_again(checkpoint):
    with fake_server(checkpoint) as (served, url):
        served.scheduler.say("A bar.")
        now = [100.0]

        async def watch():
            watch = Watch(ChatClient(url), MODEL, clock=lambda: now[0])
            for number in range(9):
                await watch.show(frame(number), "What?", 2)
                if watch._asking is not None:
                    await watch._asking
                now[0] += 0.5
            text = await watch.show(frame(9), "", 2)
            await watch.close()
            return text

        text = asyncio.run(watch())
        asked = [one for one in served.scheduler.requests if one.sampling_params.max_new_tokens]
    assert text.splitlines() == ["0:04.0  A bar.", "0:02.0  A bar.", "0:00.0  A bar."]
    assert [len(one.mm_inputs.items[0].patch_digests) for one in asked] == [1, 2, 3], "frames of every second"


def test_a_viewer_who_leaves_and_comes_back(checkpoint):
    with fake_server(checkpoint) as (_, url):
        now = [100.0]

        async def watch():
            client = ChatClient(url)
            watch = Watch(client, MODEL, clock=lambda: now[0])
            counts = []
            for left, later in ((False, 0), (True, 1), (False, 1), (False, 10), (True, 0)):
                now[0] += later
                if left:
                    await watch.leave()
                await watch.show(frame(0), "", 2)
                counts.append(len((await client.call("GET", "/v1/sessions"))["data"]))
            for opens_s in (0, 10):
                now[0] += 10
                opening = asyncio.create_task(watch.show(frame(0), "", 2))
                await asyncio.sleep(0)
                await watch.leave()
                now[0] += opens_s
                await opening
                counts.append(len((await client.call("GET", "/v1/sessions"))["data"]))
            return counts

        assert asyncio.run(watch()) == [1, 0, 0, 1, 0, 0, 0]


def test_a_server_that_is_gone_is_told_and_asked_again(checkpoint):
    watch = Watch(ChatClient("http://127.0.0.1:1"), MODEL)
    for _ in range(2):
        assert "no answer" in asyncio.run(watch.show(frame(0), "What?", 2))
    with fake_server(checkpoint) as (served, url):
        served.scheduler.say("A bar.")

        async def again():
            watch._client = ChatClient(url)
            await watch.show(frame(0), "What?", 0)
            await watch._asking
            text = await watch.show(frame(1), "", 2)
            await watch.close()
            return text

        assert "A bar." in asyncio.run(again())
