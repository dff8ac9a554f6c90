"""Waiting in a process whose file descriptors go beyond 1023, where `select` ends."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator

import pytest

from tests.vision.fake_backend import FakeBackend, make_pool
from tests.vlmserve.scheduler.test_scheduler import Knobs, Rig, expected, request
from vlmserve.warmup.encoder_thread import EncoderThread
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
    rig.scheduler.handle(message)
    while not rig.backend.queues[0]:
        rig.scheduler.step()
    wake_up.call()
    rig.scheduler.step_or_wait()
    rig.backend.finish()
    while not rig.scheduler.is_idle():
        rig.scheduler.step_or_wait()
    assert rig.tokens["r"] == expected(message)
    wake_up.close()


def test_the_thread_that_encodes_ahead_of_time_waits_for_work(monkeypatch):
    waits, wait = threading.Semaphore(0), EncoderThread._wait
    monkeypatch.setattr(EncoderThread, "_wait", lambda self, handles: (waits.release(), wait(self, handles)))
    thread = EncoderThread(make_pool(FakeBackend()), max_patches=64, num_threads=1)
    assert thread._wake_up.fd > 1023
    for content in (b"one", b"other"):
        assert waits.acquire(timeout=PATIENCE_S)
        items = request("r", [1] * 20, [(3, 12, content)]).mm_inputs.items
        answer = thread.encode(items, pin=False).result(PATIENCE_S)
        assert answer.items[0].encoded == 1
    thread.close()
