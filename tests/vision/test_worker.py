"""Worker processes with real towers: their rows are those of the tower called directly."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import pytest
import torch

from tests.tiny_checkpoints import make_checkpoint
from tests.vision.backends import collect
from tests.vision.patches import directly, make_levels, random_patches
from tests.vision.test_loading import fingerprint_of
from vision.towers.loading import load_tower
from vision.towers.temporal_patch import EncodeBatch
from vision.workers.process_backend import ProcessBackend
from vision.workers.settings import WorkerSettings
from vlmserve_common.errors import EngineError


@pytest.fixture
def shared_dir(tmp_path):
    (tmp_path / "shared").mkdir()
    yield tmp_path / "shared"
    assert list((tmp_path / "shared").iterdir()) == []


def test_rows_alone_packed_and_of_a_video_by_two_workers(tmp_path, shared_dir):
    folder = make_checkpoint("qwen3_vl", tmp_path / "model")
    tower = load_tower(folder)
    patches = [*random_patches(tower), *random_patches(tower, [(32, 40)], seed=20)]  # one with more than a frame holds
    video = random_patches(tower, [(6, 10)] * 3, seed=30)
    wrong = make_levels((3, 4), patches[0].pixels.shape[1])
    settings = WorkerSettings(model=folder, devices=("cpu", "cpu"), shared_dir=shared_dir)
    with contextlib.closing(ProcessBackend(settings)) as backend:
        assert backend.wait_ready() == fingerprint_of(tower, folder)
        batches = {
            0: patches,
            1: [patches[0], wrong],
            **{2 + number: [patch] for number, patch in enumerate(patches)},
            20: video,
            21: video[:1],
            22: video[1:],
        }
        for number, some in batches.items():
            backend.start(number % 2, EncodeBatch(number=number, patches=tuple(some)))
        results = {result.number: result for result in collect(backend, len(batches))}
    expected = [directly(tower, [patch]) for patch in patches]
    for number, rows in enumerate(expected):
        torch.testing.assert_close(results[0].embeds[number], rows, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(results[2 + number].embeds[0], rows, rtol=1e-5, atol=1e-5)
    whole = directly(tower, video)
    assert whole.shape[1] == tower.out_hidden_size * (1 + tower.num_deepstack_layers)
    torch.testing.assert_close(torch.cat(results[20].embeds), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat(results[21].embeds + results[22].embeds), whole, rtol=1e-5, atol=1e-5)
    assert results[1].embeds is None
    assert results[1].error == "ValueError: grid (1, 3, 4): t must be 1 or more, h and w positive multiples of 2"
    assert not any(result.untried for result in results.values())


def test_a_checkpoint_that_cannot_be_loaded_is_told_in_its_own_words(tmp_path, shared_dir):
    folder = make_checkpoint("qwen2_vl", tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"short")
    settings = WorkerSettings(model=folder, devices=("cpu",), shared_dir=shared_dir)
    with (
        contextlib.closing(ProcessBackend(settings)) as backend,
        pytest.raises(EngineError, match=r"model\.safetensors: no safetensors file, or a truncated one \(5 bytes\)"),
    ):
        backend.wait_ready()


def test_a_worker_is_watched_before_it_imports_torch():
    code = "import sys, vision.workers.start; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_rows_in_bfloat16(tmp_path, shared_dir):
    folder = make_checkpoint("qwen3_vl", tmp_path / "model")
    tower = load_tower(folder, dtype=torch.bfloat16)
    [patch] = random_patches(tower, [(8, 8)])
    settings = WorkerSettings(
        model=folder, devices=("cpu",), shared_dir=shared_dir, dtype="bfloat16", cpu_kernels="off"
    )
    with contextlib.closing(ProcessBackend(settings)) as backend:
        assert backend.wait_ready() == fingerprint_of(tower, folder)
        backend.start(0, EncodeBatch(number=0, patches=(patch,)))
        [result] = collect(backend, 1)
    assert result.embeds[0].dtype == torch.bfloat16
    torch.testing.assert_close(result.embeds[0], directly(tower, [patch]))
