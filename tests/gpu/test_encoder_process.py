"""An encoder process on the device under test, beside the LLM on the same one."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("msgspec", reason="encoder processes talk in msgspec, which is not installed")

from tests.gpu.test_answers import Asked, check, engine
from tests.vision.backends import collect
from tests.vision.patches import random_patches
from tests.vlmserve.reference import Reference, conversations
from vision.towers.loading import load_tower
from vision.towers.runner import TowerRunner
from vision.workers.backend import EncodeBatch
from vision.workers.process_backend import ProcessBackend
from vision.workers.settings import WorkerSettings


@pytest.fixture
def backend(folder: Path, device: torch.device, tmp_path: Path, caplog) -> Iterator[ProcessBackend]:
    caplog.set_level("INFO")
    made = ProcessBackend(
        WorkerSettings(model=folder, devices=(str(device),), rows_device=str(device), shared_dir=tmp_path)
    )
    try:
        made.wait_ready()
        yield made
    finally:
        made.close()
    assert list(tmp_path.iterdir()) == []


def counters() -> set[str]:
    """Files in which torch counts who has GPU memory open."""
    return {path.name for path in Path("/dev/shm").glob("torch_*")}


def encode(backend: ProcessBackend, number: int, patches: list) -> tuple[torch.Tensor, ...] | None:
    backend.start(0, EncodeBatch(number=number, patches=tuple(patches)))
    [result] = collect(backend, 1)
    return result.embeds


def test_rows_are_those_of_this_process(folder, device, backend):
    tower = load_tower(folder, device=device)
    runner, patches = TowerRunner(tower, device), random_patches(tower)
    expected = [rows.cpu() for rows in runner.encode(patches)]
    for number in range(3):
        rows = encode(backend, number, patches)
        for got, want in zip(rows, expected, strict=True):
            torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-5)
            assert got.untyped_storage().nbytes() == got.nbytes, "memory of its own"


def test_rows_come_by_cuda_ipc(cuda, folder, backend, caplog):
    before = counters()
    rows = encode(backend, 0, random_patches(load_tower(folder)))
    assert f"rows of the encoder worker on {cuda} come by CUDA IPC" in caplog.text, caplog.text
    assert {part.device.type for part in rows} == {"cuda"}
    backend.close()
    assert counters() <= before


def test_rows_outlive_the_worker_that_made_them(folder, device, backend):
    patches = random_patches(load_tower(folder))
    rows = encode(backend, 0, patches)
    kept = [part.clone() for part in rows]
    [worker] = [child for child in multiprocessing.active_children() if child.name.startswith("encoder-")]
    os.kill(worker.pid, signal.SIGKILL)
    again = encode(backend, 1, patches) or encode(backend, 2, patches)  # the death may not be known at once
    for part, copy, other in zip(rows, kept, again, strict=True):
        assert torch.equal(part, copy)
        torch.testing.assert_close(other, part, rtol=1e-5, atol=1e-5)


def test_answers_with_an_encoder_process(folder, device):
    reference, asked = Reference(folder), conversations()
    with engine(folder, device, dtype="float32", encoder_dp_size=1, encoder_devices=str(device)) as llm:
        check(llm, Asked(folder, asked, [reference.answer(messages, 12) for messages in asked]))
