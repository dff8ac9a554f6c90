"""Rows that stay with the worker until they are copied: who keeps what for how long, whatever dies meanwhile. Files
stand for GPU memory; the copies themselves are tested on a GPU (tests/gpu)."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock, call

import numpy as np
import pytest
import torch

from tests.vision.backends import PATIENCE_S, assert_done, collect, make_batch
from tests.vision.lending_worker import lending_worker
from vision.towers.temporal_patch import EncodeBatch
from vision.workers import cuda_rows
from vision.workers.backend import EncodeResult
from vision.workers.cuda_rows import CudaBorrower, share
from vision.workers.encoder_messages import TRIAL_ROWS, RowsHandle
from vision.workers.process_backend import ProcessBackend
from vision.workers.settings import WorkerSettings


class FileBorrower:
    """Copies rows out of files. Before each copy but that on trial, or before that, it calls something."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.copied = self.gone = 0
        self.before_trial: Callable[[RowsHandle], None] | None = None
        self.before: Callable[[RowsHandle], None] | None = None
        self.on_trial = torch.Tensor.clone

    def copy(self, handle: RowsHandle) -> tuple[torch.Tensor, ...]:
        trial = handle.row_counts == TRIAL_ROWS
        call = self.before_trial if trial else self.before
        if call is not None:
            call(handle)
        rows = torch.from_numpy(np.fromfile(os.fsdecode(handle.memory), np.float32)).view(-1, handle.width)
        self.copied += not trial
        return ((self.on_trial if trial else torch.Tensor.clone)(rows)).split(handle.row_counts)

    def worker_gone(self) -> None:
        self.gone += 1


def owner(handle: RowsHandle) -> int:
    """The process whose memory it is."""
    return int(Path(os.fsdecode(handle.memory)).name.split("-")[0])


class Lending:
    """A backend of one lending worker."""

    def __init__(self, folder: Path, prepare=lambda borrower: None) -> None:
        self.folder = folder / "lent"
        self.folder.mkdir()
        (folder / "shared").mkdir()
        self.borrower = FileBorrower("")

        def make(device: str) -> FileBorrower:
            self.borrower.device = device
            return self.borrower

        prepare(self.borrower)
        settings = WorkerSettings(
            model=folder, devices=("cuda:1",), rows_device="cuda:0", shared_dir=folder / "shared", log_level="error"
        )
        self.backend = ProcessBackend(settings, lending_worker, make)

    def encode(self, one: EncodeBatch) -> EncodeResult:
        self.backend.start(0, one)
        [result] = collect(self.backend, 1)
        return result

    def encode_by_the_next(self, one: EncodeBatch) -> EncodeResult:
        """By the worker after one that has died, which may not be known yet."""
        result = self.encode(one)
        return self.encode(one) if result.untried else result

    def kept(self) -> int:
        return len(list(self.folder.iterdir()))


def batch(number: int) -> EncodeBatch:
    return make_batch(number, (2, 2), (4, 2), width=3)


@pytest.fixture
def lending(tmp_path: Path) -> Iterator[Lending]:
    one = Lending(tmp_path)
    yield one
    one.backend.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("encoder-")]


def test_rows_are_kept_until_they_were_copied_or_could_not_be_and_no_longer(lending, caplog):
    caplog.set_level("INFO")
    seen = []

    def fail(handle: RowsHandle) -> None:
        raise RuntimeError("no such memory")

    for number in range(4):
        if number == 2:  # fails its batch alone
            lending.borrower.before = fail
            failed = lending.encode(batch(9))
            assert (failed.embeds, failed.error, failed.untried) == (None, "RuntimeError: no such memory", False)
        lending.borrower.before = lambda handle: seen.append(lending.kept())
        one = batch(number)
        assert_done(lending.encode(one), one)
    # those of the batch before went before the next was encoded
    assert seen == [1, 1, 1, 1]
    assert (lending.borrower.device, lending.borrower.copied) == ("cuda:0", 4)
    assert "rows of the encoder worker on cuda:1 come by CUDA IPC" in caplog.text


def test_rows_of_a_worker_that_dies_while_they_are_copied_do_not_count_and_others_stay(lending):
    """And a worker that does so time and again is given up."""
    first = lending.encode(batch(0))
    lending.borrower.before = lambda handle: kill(owner(handle))
    lost = lending.encode(batch(1))
    assert (lost.embeds, lost.untried) == (None, True)
    assert lost.error == "the encoder worker on cuda:1 died before its rows were copied"
    assert_done(first, batch(0))
    lending.borrower.before = None
    assert_done(lending.encode_by_the_next(batch(2)), batch(2))
    assert lending.borrower.gone == 1
    lending.borrower.before = lambda handle: kill(owner(handle))
    for number in range(3, 11):
        if not lending.backend.workers():
            break
        assert lending.encode(batch(number)).embeds is None
    assert not lending.backend.workers()


def kill(pid: int) -> None:
    """Kill a worker; returns when it has died."""
    fd = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert wait([fd], PATIENCE_S)
    os.close(fd)


def test_closing_while_rows_are_copied(tmp_path):
    copying, go_on = threading.Event(), threading.Event()

    def pause(handle: RowsHandle) -> None:
        copying.set()
        assert go_on.wait(PATIENCE_S)

    lending = Lending(tmp_path, lambda borrower: setattr(borrower, "before", pause))
    lending.backend.start(0, batch(0))
    assert copying.wait(PATIENCE_S)
    closing = threading.Thread(target=lending.backend.close)
    closing.start()
    go_on.set()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()
    assert lending.backend.collect() == []
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("encoder-")]


def refuse(handle: RowsHandle) -> None:
    raise RuntimeError("invalid device context")


@pytest.mark.parametrize(
    ("prepare", "broken", "why"),
    [
        (lambda it: setattr(it, "before_trial", refuse), "", "RuntimeError: invalid device context"),
        pytest.param(
            lambda it: setattr(it, "on_trial", torch.zeros_like),
            "",
            "ValueError: what arrives is not what was sent",
            marks=pytest.mark.slow,
        ),
        pytest.param(lambda it: None, "not here", "RuntimeError: not here", marks=pytest.mark.slow),
    ],
    ids=["not-opened", "wrong", "not-shared"],
)
def test_where_the_trial_fails_rows_come_through_the_host(tmp_path, caplog, prepare, broken, why):
    if broken:
        (tmp_path / "share").write_text(broken)
    lending = Lending(tmp_path, prepare)
    try:
        for number in range(2):
            assert_done(lending.encode(batch(number)), batch(number))
    finally:
        lending.backend.close()
    assert (lending.borrower.copied, lending.kept()) == (0, 0)
    warning = f"rows of the encoder worker on cuda:1 come through the host's memory: no CUDA IPC: {why}"
    assert warning in caplog.text


@pytest.mark.parametrize(
    ("device", "rows_device", "may"),
    [("cuda:1", "cuda", True), ("cuda", "cpu", False), ("cpu", "cuda:0", False), ("cpu", "cpu", False)],
)
def test_rows_are_only_lent_from_gpu_to_gpu(tmp_path, device, rows_device, may):
    settings = WorkerSettings(model=tmp_path, devices=(device,), rows_device=rows_device, shared_dir=tmp_path)
    assert settings.may_lend(device) == may


@pytest.fixture
def on_gpu(monkeypatch) -> SimpleNamespace:
    """Rows of the CPU, and stand-ins for the calls of torch that need a GPU."""
    rows = torch.arange(12.0).view(6, 2).bfloat16()
    fields = (1, b"memory", rows.nbytes, 512, b"/torch_1_2_3", 7, b"event", True)
    opened, released, used, cuda = Mock(return_value=rows.untyped_storage()), Mock(), Mock(), MagicMock()
    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", lambda _: fields, raising=False)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", opened)
    monkeypatch.setattr(torch.UntypedStorage, "_release_ipc_counter_cuda", released)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, stream: used(stream))
    monkeypatch.setattr(torch, "cuda", cuda)
    return SimpleNamespace(rows=rows, fields=fields, opened=opened, released=released, used=used, cuda=cuda)


def test_a_handle_says_all_that_opening_takes_and_copies_have_memory_of_their_own(on_gpu):
    handle = share(on_gpu.rows, [4, 2])
    on_gpu.cuda.current_stream().synchronize.assert_called_once_with()
    first, second = CudaBorrower("cpu").copy(handle)
    on_gpu.opened.assert_called_once_with(*on_gpu.fields)
    on_gpu.cuda.Stream().synchronize.assert_called_once_with()
    assert on_gpu.used.call_args_list == [call(on_gpu.cuda.default_stream())] * 2
    assert torch.equal(torch.cat([first, second]), on_gpu.rows)
    assert [len(first), len(second)] == [4, 2]
    assert first.data_ptr() != on_gpu.rows.data_ptr()
    assert first.untyped_storage().nbytes() == first.nbytes


@pytest.mark.parametrize(
    ("count", "opening", "error"),
    [(6, "peer access is not supported", RuntimeError), (5, r"24 bytes are not rows \[5, 2\] of bfloat16", ValueError)],
)
def test_a_handle_that_cannot_be_opened_is_given_back(on_gpu, count, opening, error):
    handle = share(on_gpu.rows, [count])
    on_gpu.opened.side_effect = RuntimeError("peer access is not supported")
    with pytest.raises(error, match=opening):
        CudaBorrower("cpu").copy(handle)
    on_gpu.released.assert_called_once_with(b"/torch_1_2_3", 7)


def test_counters_of_a_worker_that_is_gone_are_removed_and_no_others(on_gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(cuda_rows, "_SHARED_MEMORY", tmp_path)
    for name in ("torch_1_2_3", "torch_1_2_4"):
        (tmp_path / name).touch()
    borrower = CudaBorrower("cpu")
    borrower.copy(share(on_gpu.rows, [6]))
    borrower.worker_gone()
    borrower.worker_gone()
    assert [path.name for path in tmp_path.iterdir()] == ["torch_1_2_4"]
