"""Towers by graphs: every row as without, whatever pictures come together."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from tests.fake_graphs import CallsAgain, Recorder
from tests.tiny_checkpoints import FAMILIES, make_checkpoint
from tests.vision.patches import random_patches
from vision.towers.grids import Segments, StaticSegments
from vision.towers.loading import load_tower
from vision.towers.runner import TowerRunner
from vision.towers.tower_graphs import CapturedTower, TiledSegments, capture_tower
from vlmserve_common.compute.rotary import Rotation, rotate

CPU = torch.device("cpu")
SIDES = st.sampled_from([2, 4, 6, 8, 10])


class Masked(StaticSegments):
    """With torch: a patch's number says whom it attends to; what pads is a segment, too."""

    def __init__(self, patches: int, longest: int) -> None:
        self._mask = torch.ones(patches, patches, dtype=torch.bool)

    def fits(self, segments: Segments) -> bool:
        return len(segments.lengths) <= 40

    def load(self, segments: Segments) -> None:
        numbers = torch.full((len(self._mask),), -1)
        numbers[: sum(segments.lengths)] = torch.repeat_interleave(torch.tensor(segments.lengths))
        torch.eq(numbers[:, None], numbers[None], out=self._mask)

    def attend(self, qkv: torch.Tensor, rotary: Rotation) -> torch.Tensor:
        q, k, v = (part.transpose(0, 1)[None] for part in (*(rotate(qkv[:, i], *rotary) for i in (0, 1)), qkv[:, 2]))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask)[0].transpose(0, 1)


class Forgetful(Masked):
    def load(self, segments: Segments) -> None:
        self._mask = self._mask.clone()
        super().load(segments)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: make_checkpoint(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


class Towers:
    """One and the same, without and with graphs."""

    def __init__(self, folder: Path, capturer: CallsAgain | Recorder, segments: type[Masked] = Masked) -> None:
        self.capturer = capturer
        self.eager = TowerRunner(load_tower(folder), CPU)
        self.tower = load_tower(folder)
        graphs = CapturedTower(self.tower, (31, 64, 200), make_segments=segments, capturer=capturer)
        assert graphs.buckets == (32, 64, 200)
        self.tower.attach_graphs(graphs)
        self.captured = TowerRunner(self.tower, CPU)


@pytest.fixture(scope="module", params=[(family, fake) for family in FAMILIES for fake in (CallsAgain, Recorder)])
def towers(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Towers:
    family, fake = request.param
    return Towers(folders[family], fake())


@given(batches=st.lists(st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=4), min_size=1, max_size=3))
@settings(max_examples=12)
def test_rows_are_those_without_graphs(towers: Towers, batches: list[list[tuple[int, int]]]) -> None:
    for number, grids in enumerate(batches):
        patches = random_patches(towers.tower, grids, seed=number)
        replayed = towers.capturer.replayed
        got = towers.captured.encode(patches)
        fits = sum(h * w for h, w in grids) <= 200
        assert towers.capturer.replayed - replayed == int(fits)
        for rows, wanted in zip(got, towers.eager.encode(patches), strict=True):
            torch.testing.assert_close(rows, wanted, atol=1e-4, rtol=1e-4)


def test_embeddings_are_no_static_memory(towers: Towers) -> None:
    [patch] = random_patches(towers.tower, [(6, 10)])
    [first] = towers.captured.encode([patch])
    kept = first.clone()
    towers.captured.encode(random_patches(towers.tower, [(8, 8)], seed=5))
    assert torch.equal(first, kept)


def test_memory_that_is_made_anew_is_found(folders: dict[str, Path]) -> None:
    towers = Towers(folders["qwen2_vl"], Recorder(), Forgetful)
    patches = random_patches(towers.tower, [(6, 10), (8, 8)])
    assert not torch.allclose(torch.cat(towers.captured.encode(patches)), torch.cat(towers.eager.encode(patches)))


def test_a_tower_gets_its_graphs(folders: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    tower, capturer, memory = load_tower(folders["qwen3_vl"]), CallsAgain(), iter([9 << 20, 4 << 20])
    with caplog.at_level(logging.INFO):
        capture_tower(tower, make_segments=Masked, capturer=capturer, free=lambda: next(memory), buckets=(32, 64))
    [line] = caplog.messages
    assert line.startswith("captured the vision tower's layers for 32, 64 patches (2 CUDA graphs) in ")
    assert line.endswith("; they take 5 MiB")
    TowerRunner(tower, CPU).encode(random_patches(tower, [(4, 4)]))
    assert capturer.replayed == 1


def test_a_tower_that_cannot_be_captured(folders: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    class Waits(Masked):
        def attend(self, qkv: torch.Tensor, rotary: Rotation) -> torch.Tensor:
            self._mask.sum().item()
            return super().attend(qkv, rotary)

    tower = load_tower(folders["qwen3_vl"])
    capture_tower(tower, make_segments=Waits, capturer=Recorder(), free=lambda: 0, buckets=(32,))
    [line] = caplog.messages
    assert line.startswith("the vision tower is not captured as CUDA graphs: ")
    assert len(TowerRunner(tower, CPU).encode(random_patches(tower, [(4, 4)]))) == 1


# ---------------------------------------------------------------- tiled segments


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


def test_rows_by_tiles_are_those_without_graphs(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen2_5_vl", tmp_path)  # which has windows, too
    tower, capturer = load_tower(folder), CallsAgain()
    tower.attach_graphs(CapturedTower(tower, (48,), make_segments=tiled, capturer=capturer))
    for number, grids in enumerate([[(2, 2)], [(6, 6), (2, 4)]]):
        patches = random_patches(tower, grids, seed=number)
        wanted = TowerRunner(load_tower(folder), CPU).encode(patches)
        for rows, want in zip(TowerRunner(tower, CPU).encode(patches), wanted, strict=True):
            torch.testing.assert_close(rows, want, atol=1e-4, rtol=1e-4)
    assert capturer.replayed == 2
