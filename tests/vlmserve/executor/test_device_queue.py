"""Work for the device: in order, off the caller's thread, errors where the result is asked for, and an orderly end."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from vlmserve.config.engine_args import EngineArgs
from vlmserve.engine import build
from vlmserve.executor.device_queue import DeviceQueue, StreamQueue, ThreadQueue
from vlmserve_common.errors import EngineError

LIMIT_S = 60  # of waits that only end by it if something is broken


@pytest.fixture(params=[DeviceQueue, StreamQueue, ThreadQueue])
def device(request):
    device = request.param()
    yield device
    device.close()


def test_work_is_done_in_the_order_in_which_it_was_submitted(device):
    done: list[int] = []
    works = [device.submit(done.append, number) for number in range(100)]
    works[-1].result()
    assert done == list(range(100))


def test_errors_stay_what_they_are(device):
    with pytest.raises(ValueError, match="seven"):
        device.submit(int, "seven").result()


@pytest.mark.parametrize("failure", [KeyboardInterrupt, SystemExit])
def test_what_would_end_the_thread_is_an_engine_error(failure):
    def fail() -> None:
        raise failure

    device = ThreadQueue()
    work = device.submit(fail)
    with pytest.raises(EngineError, match=failure.__name__):
        work.result()
    assert device.submit(int, "7").result() == 7
    device.close()


def test_all_is_done_in_one_thread_that_was_prepared():
    seen: list[threading.Thread] = []
    device = ThreadQueue(started=lambda: seen.append(threading.current_thread()))
    threads = {device.submit(threading.current_thread).result() for _ in range(3)}
    assert threads == set(seen)
    assert threading.current_thread() not in threads
    device.close()
    assert not seen[0].is_alive()


def test_closing_does_what_was_submitted():
    device, gate, done = ThreadQueue(), threading.Event(), []
    held = device.submit(gate.wait, LIMIT_S)
    works = [device.submit(done.append, number) for number in range(5)]
    closing = threading.Thread(target=device.close)
    closing.start()
    gate.set()
    closing.join(LIMIT_S)
    assert not closing.is_alive()
    assert done == list(range(5))
    assert all(work.result() is None for work in works)
    assert held.result(), "the caller went on meanwhile"


_ENDING = """
import threading
from vlmserve.executor.device_queue import ThreadQueue

def go_on():
    threading.main_thread().join()
    print(device.submit(int, "7").result())

device, hangs = ThreadQueue(), ThreadQueue()
threading.Thread(target=go_on).start()
hangs.submit(threading.Event().wait)
"""


def test_it_works_behind_the_main_thread_and_keeps_no_process_from_its_end():
    ended = subprocess.run([sys.executable, "-c", _ENDING], capture_output=True, text=True, timeout=LIMIT_S)
    assert (ended.returncode, ended.stdout) == (0, "7\n"), ended.stderr


def test_on_a_gpu_work_is_launched_in_the_thread_that_submits_it():
    device = StreamQueue()
    assert (device.depth, device.least_reqs) == (2, 0)
    assert device.submit(threading.current_thread).result() is threading.current_thread()


@pytest.mark.parametrize("overlap", [True, False])
def test_on_a_gpu_it_is_the_current_one_of_the_thread_that_submits(overlap, monkeypatch):
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    args = EngineArgs(model="m", disable_overlap_schedule=not overlap)
    device = build._device_queue(args, torch.device("cuda:1"), 1)
    assert device.depth == (2 if overlap else 1)
    assert [run(len, chosen).result() for run in (device.submit, device.here)] == [1, 2]
    assert chosen == [torch.device("cuda:1")] * 2
