"""Captured work on a GPU: the same as without."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from tests.vision.patches import random_patches
from vision.towers.loading import load_tower
from vision.towers.runner import TowerRunner
from vision.towers.tower_graphs import capture_on_gpu
from vlmserve_common.compute.graphs import CudaCapturer


def test_a_replay_reads_what_is_there_now(cuda: torch.device) -> None:
    x, out = torch.zeros(8, device=cuda), torch.zeros(8, device=cuda)
    capturer = CudaCapturer(cuda)
    both = [capturer.capture(lambda factor=factor: out.copy_((x * factor).relu())) for factor in (2, 3)]
    x.fill_(5)
    for graph, expected in zip(both, (10, 15), strict=True):
        graph.replay()
        assert out.tolist() == [expected] * 8


def test_rows_of_a_tower(cuda: torch.device, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    eager = TowerRunner(load_tower(folder, device=cuda), cuda)
    tower = load_tower(folder, device=cuda)
    with caplog.at_level(logging.INFO):
        capture_on_gpu(tower, cuda)
    assert "captured the vision tower's layers for 256, 512" in caplog.text
    runner = TowerRunner(tower, cuda)
    for grids in ([(16, 16)], [(4, 6), (10, 8), (2, 2)], [(2, 60)], [(40, 52)]):
        patches = random_patches(tower, grids)
        for rows, wanted in zip(runner.encode(patches), eager.encode(patches), strict=True):
            torch.testing.assert_close(rows, wanted, atol=1e-3, rtol=1e-3)
