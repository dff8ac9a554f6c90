"""Encoder workers that hang without dying, by a clock that is set by hand."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from tests.vision.backends import PATIENCE_S, Fakes, collect
from tests.vision.fake_worker import DIE, PAUSE
from tests.vision.patches import make_patch
from tests.vlmserve.server_process import gone
from vision.workers.backend import EncodeBatch
from vlmserve_common.process import supervisor
from vlmserve_common.process.child import ChildProcess

LIMIT_S = 0.25  # by the clock of the tests; that often it is looked at
REASON = "the encoder worker on cuda:0 was not done with a batch after 0.25 s; --encoder-timeout-s allows more"


class Bench:
    """A fake worker and a clock."""

    def __init__(self, folder: Path) -> None:
        self.now = 0.0
        self._looks = threading.Semaphore(0)
        os.mkfifo(folder / "paused")
        self._paused = os.open(folder / "paused", os.O_RDWR)  # so that it never ends
        self.fake = Fakes(folder, "ok", clock=self._clock, batch_timeout_s=LIMIT_S)
        self.backend = self.fake.backend

    def await_pause(self) -> None:
        """Until a worker is at a batch that it never ends."""
        assert wait([self._paused], PATIENCE_S), "no worker hangs"
        assert os.read(self._paused, 1) == b"p"

    def later(self, seconds: float) -> None:
        self.now += seconds

    def assert_patient(self) -> None:
        """The clock was looked at, and nothing came of it."""
        while self._looks.acquire(blocking=False):
            pass
        for _ in range(2):  # the first look may have begun before
            assert self._looks.acquire(timeout=PATIENCE_S), "nobody looks at the clock"
        assert self.backend.collect() == []

    def stop(self) -> int:
        """Stop the worker; its pid, when it has."""
        pid = self.fake.pids()[-1]
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        return pid

    def _clock(self) -> float:
        if threading.current_thread().name.endswith("-watch"):
            self._looks.release()
        return self.now

    def close(self) -> None:
        self.backend.close()
        os.close(self._paused)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    made.backend.wait_ready()
    yield made
    made.close()
    assert all(gone(pid) for pid in made.fake.pids())
    assert list(made.fake.shared_dir.iterdir()) == []


def batch(number: int, *, first_pixel: float | None = None) -> EncodeBatch:
    made = make_patch((2, 2), 1, seed=number)
    if first_pixel is not None:
        made.pixels[0, 0] = first_pixel
    return EncodeBatch(number=number, patches=(made,))


def test_a_worker_that_hangs_is_ended_and_started_again_and_its_batches_fail(bench, caplog):
    hung = bench.fake.pids()[0]
    bench.backend.start(0, batch(1, first_pixel=PAUSE))
    bench.await_pause()
    bench.later(LIMIT_S / 2)
    bench.assert_patient()
    bench.backend.start(0, batch(2))
    bench.later(LIMIT_S / 2)
    results = collect(bench.backend, 2)
    assert [(one.number, one.embeds, one.error, one.untried) for one in results] == [
        (1, None, REASON, False),
        (2, None, REASON, True),
    ]
    assert gone(hung)
    bench.backend.start(0, batch(3))
    assert collect(bench.backend, 1)[0].error == ""
    bench.backend.start(0, batch(4, first_pixel=DIE))
    assert collect(bench.backend, 1)[0].error == "the encoder worker on cuda:0 was killed by SIGKILL"
    assert f"{REASON}: starting it again" in caplog.text


def test_the_limit_is_for_each_batch_and_not_for_idling(bench):
    for number in range(3):
        bench.later(10 * LIMIT_S)
        bench.backend.start(0, batch(number))
        assert collect(bench.backend, 1)[0].error == ""
    pid = bench.stop()
    for number in (4, 5, 6):
        bench.backend.start(0, batch(number, first_pixel=PAUSE if number == 6 else None))
    bench.later(LIMIT_S / 2)
    bench.assert_patient()
    os.kill(pid, signal.SIGCONT)
    assert [one.error for one in collect(bench.backend, 2)] == ["", ""]
    bench.await_pause()
    bench.later(LIMIT_S / 2)
    bench.assert_patient()
    bench.later(LIMIT_S / 2)
    assert collect(bench.backend, 1)[0].error == REASON


def test_the_time_that_a_worker_takes_to_start_is_not_its_batches(tmp_path, monkeypatch):
    begun = threading.Event()

    class Slow(ChildProcess):
        def take_report(self):
            assert begun.wait(PATIENCE_S)
            return super().take_report()

    monkeypatch.setattr(supervisor, "ChildProcess", Slow)
    bench = Bench(tmp_path)
    bench.backend.start(0, batch(1))
    bench.now = 10 * LIMIT_S
    begun.set()
    assert collect(bench.backend, 1)[0].error == ""
    bench.close()
