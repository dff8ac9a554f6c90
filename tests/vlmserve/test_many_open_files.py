"""Waiting in a process whose file descriptors go beyond 1023, where `select` ends."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Iterator

import pytest

from tests.vision.fake_backend import FakeBackend, make_pool
from tests.vlmserve.scheduler.prompts import request
from tests.vlmserve.scheduler.rig import Knobs, Rig
from vlmserve.commands.warmup.local import EncoderLoop
from vlmserve_common.process.wake_up import WakeUp

PATIENCE_S = 20.0


@pytest.fixture(autouse=True)
def many_open_files() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2048), limits[1]))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    yield
    for fd in opened:
        os.close(fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_the_offline_loop_waits_for_the_encoder(monkeypatch):
    rig = Rig(Knobs(encoders=1))
    wake_up = WakeUp()
    assert wake_up.fd > 1023
    monkeypatch.setattr(rig.backend, "wait_handles", lambda: [wake_up.fd])
    message = request("r", [1] * 20, [(3, 12, b"picture")])
    rig.handle(message)
    while not rig.backend.queues[0]:
        rig.step()
    wake_up.call()
    rig.loop.step_or_wait()
    rig.backend.finish()
    while not rig.loop.is_idle():
        rig.loop.step_or_wait()
    rig.check_answers(message)
    wake_up.close()


def test_the_thread_that_encodes_ahead_of_time_waits_for_work(monkeypatch):
    """The second message comes while the loop waits, for a handle beyond 1023, too."""
    wake_up, backend = WakeUp(), FakeBackend()
    assert wake_up.fd > 1023
    monkeypatch.setattr(backend, "wait_handles", lambda: [wake_up.fd])

    async def encode() -> None:
        waits, wait = asyncio.Semaphore(0), EncoderLoop._wait
        monkeypatch.setattr(EncoderLoop, "_wait", lambda self: (waits.release(), wait(self))[1])
        encoder = EncoderLoop(make_pool(backend), max_patches=64, num_threads=1)
        for content in (b"one", b"other"):
            items = request("r", [1] * 20, [(3, 12, content)]).mm_inputs.items
            answer = await encoder.encode(items, pin=False)
            assert answer.items[0].encoded == 1
            await waits.acquire()
        await encoder.close()

    asyncio.run(asyncio.wait_for(encode(), PATIENCE_S))
    wake_up.close()
