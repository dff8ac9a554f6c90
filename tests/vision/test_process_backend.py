"""Worker processes that live and die, with fake insides: results, restarts, and what is left behind (nothing)."""

from __future__ import annotations

import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import pytest

from tests.vision.backends import PATIENCE_S, Fakes, assert_done, collect
from tests.vision.backends import make_batch as batch
from tests.vision.fake_worker import DIE, EXIT, FAIL, PAUSE
from tests.vision.patches import make_patch
from tests.vlmserve.server_process import ROOT, gone
from vision.towers.temporal_patch import EncodeBatch, TemporalPatch
from vlmserve_common.errors import EngineError
from vlmserve_common.process import supervisor
from vlmserve_common.process.child import STOP_PATIENCE_S, ChildProcess
from vlmserve_common.transport.wire import SHARED_FROM_BYTES

LARGE = (2, SHARED_FROM_BYTES // 8)  # one pixel value a patch


@pytest.fixture
def fakes(tmp_path: Path) -> Iterator[object]:
    """Makes one; afterwards nothing of it may be left."""
    made: list[Fakes] = []
    resource_tracker.ensure_running()
    before = fds()

    def make(*plans: str, **settings: object) -> Fakes:
        made.append(Fakes(tmp_path, *plans, **settings))
        return made[-1]

    yield make
    for one in made:
        one.backend.close()
        assert all(gone(pid) for pid in one.pids())
        assert list(one.shared_dir.iterdir()) == []
        assert (one.backend.collect(), list(one.backend.wait_handles())) == ([], [])
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("encoder-")]
    gc.collect()
    assert fds() <= before


def fds() -> set[str]:
    return {f"{fd.name} {os.readlink(fd)}" for fd in Path("/proc/self/fd").iterdir() if fd.exists()}


def stop(pid: int) -> None:
    """Stop a worker; returns when it has."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def assert_works(fake: Fakes, number: int = 99, worker: int = 0) -> None:
    one = batch(number)
    fake.backend.start(worker, one)
    [result] = collect(fake.backend, 1)
    assert_done(result, one)


@pytest.mark.filterwarnings("error:.*not writable")
def test_batches_come_back_in_order_each_from_its_worker(fakes):
    fake = fakes("ok", "ok")
    sent = [batch(number, (2, 2), LARGE, (4, 2)) for number in range(12)]
    for one in sent:  # before the workers are ready
        fake.backend.start(one.number % 2, one)
    results = collect(fake.backend, 12)
    for worker in (0, 1):
        assert [r.number for r in results if r.number % 2 == worker] == list(range(worker, 12, 2))
    for result in results:
        assert_done(result, sent[result.number])
        for rows in result.embeds:
            assert rows.untyped_storage().nbytes() == rows.nbytes, "memory of its own"
    assert list(fake.backend.workers()) == [0, 1]
    assert len(fake.pids()) == 2


def test_without_room_in_shared_memory_arrays_go_through_the_pipe_and_nobody_waits_for_it(fakes, caplog):
    fake = fakes("ok")
    fake.backend.wait_ready()
    fake.shared_dir.rmdir()
    stop(fake.pids()[0])
    sent = [batch(number, (2, 500_000)) for number in range(3)]  # each many times what a pipe holds
    for one in sent:
        fake.backend.start(0, one)  # returns, though nobody reads
    os.kill(fake.pids()[0], signal.SIGCONT)
    for one, result in zip(sent, collect(fake.backend, 3), strict=True):
        assert_done(result, one)
    assert "no room for a large array in shared memory" in caplog.text
    fake.shared_dir.mkdir()


def test_a_batch_that_fails_or_cannot_be_sent_fails_alone(fakes):
    fake = fakes("ok")
    sent = [batch(0), batch(1, order=FAIL), batch(2)]
    for one in sent:
        fake.backend.start(0, one)
    first, failed, last = collect(fake.backend, 3)
    assert_done(first, sent[0])
    assert_done(last, sent[2])
    assert (failed.number, failed.embeds, failed.error, failed.untried) == (1, None, "ValueError: asked for", False)
    wrong = TemporalPatch(digest=b"", grid=(2, 2), pixels=np.full((4, 3), None))
    fake.backend.start(0, EncodeBatch(number=5, patches=(make_patch((2, 2), 3), wrong)))
    [failed] = collect(fake.backend, 1)
    assert (failed.number, failed.embeds) == (5, None)
    assert "cannot send an array of object" in failed.error
    assert_works(fake)
    assert len(fake.pids()) == 1


def test_a_worker_that_dies_in_work_fails_its_batches_and_is_started_again(fakes, caplog):
    how = "was killed by SIGKILL"
    fake = fakes("ok")
    fake.backend.wait_ready()
    stop(fake.pids()[0])
    for number, what in enumerate((DIE, None, None)):
        fake.backend.start(0, batch(number, LARGE, order=what))
    os.kill(fake.pids()[0], signal.SIGCONT)
    results = collect(fake.backend, 3)
    assert [result.number for result in results] == [0, 1, 2]
    assert {result.error for result in results} == {f"the encoder worker on cuda:0 {how}"}
    assert [result.embeds for result in results] == [None] * 3
    assert [result.untried for result in results] == [False, True, True]
    assert list(fake.shared_dir.iterdir()) == []
    assert list(fake.backend.workers()) == [0]
    assert_works(fake)
    assert len(fake.pids()) == 2
    assert f"the encoder worker on cuda:0 {how}: starting it again" in caplog.text


def test_a_worker_killed_while_idle_is_started_again(fakes, caplog):
    fake = fakes("ok", "ok")
    fake.backend.wait_ready()
    for worker in (0, 1):
        assert_works(fake, worker=worker)
    for pid in fake.pids():
        os.kill(pid, signal.SIGKILL)
    for worker in (0, 1):
        one = batch(worker)
        fake.backend.start(worker, one)
        [result] = collect(fake.backend, 1)
        if result.embeds is None:  # it was given to the worker before its death was known
            assert result.error == f"the encoder worker on cuda:{worker} was killed by SIGKILL"
            fake.backend.start(worker, one)
            [result] = collect(fake.backend, 1)
        assert_done(result, one)
    assert len(fake.pids()) == 4


def test_a_worker_that_dies_three_times_in_a_row_is_given_up(fakes, caplog):
    fake = fakes("ok die", "ok")
    fake.backend.start(0, batch(1, order=DIE))
    [result] = collect(fake.backend, 1)
    assert not result.untried
    reason = "the encoder worker on cuda:0 was killed by SIGKILL while starting"
    reason += ", as the kernel does when memory runs out"
    numbers = iter(range(2, 1000))
    while 0 in fake.backend.workers():
        fake.backend.start(0, batch(next(numbers)))
        [result] = collect(fake.backend, 1)
        assert (result.error, result.untried) == (reason, True)
    fake.backend.start(0, batch(0))
    assert collect(fake.backend, 1)[0].error == reason
    assert list(fake.backend.workers()) == [1]
    assert_works(fake, worker=1)
    assert f"{reason}: given up after 3 deaths with nothing done between them" in caplog.text
    assert len(fake.pids()) == 4


@pytest.mark.parametrize(
    ("plans", "timeout_s", "message"),
    [
        (("ok", "error"), PATIENCE_S, r"^no tower in there$"),
        (("hang",), 0.5, r"^the encoder worker on cuda:0 is not ready after 0\.5 s; --startup-timeout-s allows more$"),
    ],
    ids=["error", "timeout"],
)
def test_waiting_for_readiness_tells_why_there_is_none(fakes, plans, timeout_s, message):
    fake = fakes(*plans, startup_timeout_s=timeout_s)
    with pytest.raises(EngineError, match=message):
        fake.backend.wait_ready()


@pytest.mark.timeout(PATIENCE_S)
def test_a_first_start_is_over_when_that_of_the_server_must_be(fakes):
    fake = fakes("hang", startup_timeout_s=3600.0, ready_by=time.monotonic())
    with pytest.raises(EngineError, match=r"^the encoder worker on cuda:0 is not ready after 3600 s; --startup-tim"):
        fake.backend.wait_ready()


def test_later_starts_have_time_of_their_own(fakes):
    now = 0.0
    fake = fakes("ok", startup_timeout_s=PATIENCE_S, ready_by=PATIENCE_S, clock=lambda: now)
    fake.backend.wait_ready()
    now = 2 * PATIENCE_S
    fake.backend.start(0, batch(0, order=EXIT))
    collect(fake.backend, 1)
    assert_works(fake)


@pytest.mark.parametrize("stopped", [False, True], ids=["in-work", "stopped"])
def test_closing_ends_workers_whatever_they_do(fakes, caplog, stopped):
    fake = fakes("ok")
    fake.backend.wait_ready()
    if stopped:
        stop(fake.pids()[0])
    for number, what in enumerate((PAUSE, None)):
        fake.backend.start(0, batch(number, LARGE, order=what))
    began = time.monotonic()
    fake.backend.close()
    assert time.monotonic() - began < STOP_PATIENCE_S
    assert "killing it" not in caplog.text
    fake.backend.start(0, batch(2))  # after the end: nothing
    fake.backend.close()


_PARENT = """
if __name__ == "__main__":  # not in the workers, which need none of it
    import sys
    from pathlib import Path
    from tests.vision.backends import Fakes
    fake = Fakes(Path(sys.argv[1]), "ok", "ok")
    fake.backend.wait_ready()
    print(*fake.pids(), flush=True)
    if sys.argv[2] == "stay":
        sys.stdin.read()
"""


@pytest.mark.parametrize("how", ["killed", "ends-without-closing"])
def test_workers_end_with_their_parent(tmp_path, how):
    script = tmp_path / "parent.py"
    script.write_text(_PARENT)
    words = [sys.executable, str(script), str(tmp_path), "stay" if how == "killed" else "end"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        try:
            pids = [int(pid) for pid in parent.stdout.readline().split()]
            assert len(pids) == 2
            watched = [os.pidfd_open(pid) for pid in pids if not gone(pid)]
            if how == "killed":
                parent.kill()
            for fd in watched:
                assert select.select([fd], [], [], PATIENCE_S)[0], "a worker outlives its parent"
                os.close(fd)
            assert parent.wait(PATIENCE_S) == (-signal.SIGKILL if how == "killed" else 0)
        finally:
            parent.kill()


def test_a_worker_that_finds_other_weights_than_at_first_is_not_used(fakes):
    """Its rows would be kept under the key of the others."""
    fake = fakes("ok")
    assert fake.backend.wait_ready() == b"\x00"
    (fake.folder / "fingerprint").write_text("0102")
    fake.backend.start(0, batch(1, order=DIE))
    assert "SIGKILL" in collect(fake.backend, 1)[0].error
    reason = f"the encoder worker on cuda:0 found other weights or settings in {fake.folder} than before"
    numbers = iter(range(2, 1000))
    while 0 in fake.backend.workers():
        fake.backend.start(0, batch(next(numbers)))
        [result] = collect(fake.backend, 1)
        assert (result.error, result.embeds) == (reason, None)


def test_workers_that_find_different_weights_are_refused(fakes):
    fake = fakes("ok", "ok")
    first = Future()
    first.set_result({"fingerprint": "01"})
    fake.backend._keepers[1].first_start = first
    with pytest.raises(EngineError, match=r"changed while the encoder workers loaded it: their towers differ$"):
        fake.backend.wait_ready()


def test_handles_are_quiet_once_all_is_collected(fakes):
    fake = fakes("ok")
    assert not wait(fake.backend.wait_handles(), 0)
    assert_works(fake)
    deadline = time.monotonic() + 5
    while wait(fake.backend.wait_handles(), 0):  # a wake-up may come behind its result, once
        assert fake.backend.collect() == []
        assert time.monotonic() < deadline


def test_deaths_with_work_done_between_them_are_not_counted_together(fakes):
    fake = fakes("ok")
    for number in range(4):
        assert_works(fake, number)
        fake.backend.start(0, batch(9, order=EXIT))
        [result] = collect(fake.backend, 1)
        assert "status 7" in result.error
    assert_works(fake)


def test_closing_while_a_worker_starts(fakes):
    fake = fakes("hang", "ok")
    fake.backend.start(1, batch(1))
    assert_done(collect(fake.backend, 1)[0], batch(1))
    fake.backend.close()
    with pytest.raises(EngineError):
        fake.backend.wait_ready()


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
        stop(pid)
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


def test_a_worker_that_hangs_is_ended_and_started_again_and_its_batches_fail(bench, caplog):
    hung = bench.fake.pids()[0]
    bench.backend.start(0, batch(1, order=PAUSE))
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
    bench.backend.start(0, batch(4, order=DIE))
    assert collect(bench.backend, 1)[0].error == "the encoder worker on cuda:0 was killed by SIGKILL"
    assert f"{REASON}: starting it again" in caplog.text


def test_the_limit_is_for_each_batch_and_not_for_idling(bench):
    for number in range(3):
        bench.later(10 * LIMIT_S)
        bench.backend.start(0, batch(number))
        assert collect(bench.backend, 1)[0].error == ""
    pid = bench.stop()
    for number in (4, 5, 6):
        bench.backend.start(0, batch(number, order=PAUSE if number == 6 else None))
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
