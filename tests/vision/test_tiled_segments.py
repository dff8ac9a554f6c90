"""Segments in a tensor of constant length, attended to by the kernel for GPUs: the same rows as without."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fake_graphs import CallsAgain
from tests.tiny_checkpoints import make_checkpoint
from tests.vision.patches import random_patches
from vision.towers.grids import Segments
from vision.towers.loading import load_tower
from vision.towers.runner import TowerRunner
from vision.towers.tower_graphs import CapturedTower, TiledSegments

CPU = torch.device("cpu")


def tiled(patches: int, longest: int) -> TiledSegments:
    return TiledSegments(patches, longest, dtype=torch.float32, device=CPU)


@given(lengths=st.lists(st.integers(1, 150), min_size=1, max_size=9), longest=st.sampled_from([64, 256]))
@settings(max_examples=50)
def test_every_patch_is_in_one_tile(lengths: list[int], longest: int) -> None:
    segments = tiled(1350, longest)
    segments.load(Segments([1] * 84, CPU))  # what was there before
    assert segments.fits(Segments(lengths, CPU))
    segments.load(Segments(lengths, CPU))
    rows, seen = segments._rows, []
    for begin, end, first in segments._tiles.tolist():
        if begin < end:
            seen += [(begin, end, patch) for patch in range(first, min(first + rows, end))]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    assert sorted(seen) == [
        (end - length, end, patch)
        for end, length in zip(ends, lengths, strict=True)
        for patch in range(end - length, end)
    ]


def test_room_for_tiles() -> None:
    segments = tiled(256, 64)
    assert segments.fits(Segments([16] * 16, CPU))
    assert not segments.fits(Segments([15] * 17, CPU))
    assert not segments.fits(Segments([16] * 16 + [1], CPU))


def test_rows_are_those_without_graphs(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen2_5_vl", tmp_path)  # which has windows, too
    tower, capturer = load_tower(folder), CallsAgain()
    tower.attach_graphs(CapturedTower(tower, (48,), make_segments=tiled, capturer=capturer))
    for number, grids in enumerate([[(2, 2)], [(6, 6), (2, 4)]]):
        patches = random_patches(tower, grids, seed=number)
        wanted = TowerRunner(load_tower(folder), CPU).encode(patches)
        for rows, want in zip(TowerRunner(tower, CPU).encode(patches), wanted, strict=True):
            torch.testing.assert_close(rows, want, atol=1e-4, rtol=1e-4)
    assert capturer.replayed == 2
