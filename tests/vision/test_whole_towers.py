"""Whole towers by our operators and in pieces: torch's answer, the same bits however finely they are cut, whatever else
is encoded; and pieces cost what they say."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from tests.tiny_checkpoints import FAMILIES, make_checkpoint
from tests.vision.patches import random_patches
from vision.towers.blocks import VisionTower, encoding_cost, encoding_flops
from vision.towers.grids import Grid
from vision.towers.loading import load_tower, make_tower
from vision.towers.pieces import UNLIMITED, Kind, Piece, PieceLimits, Steps, limited_tiles
from vision.towers.runner import TowerRunner
from vlmserve_common.compute.linear import pack_linears
from vlmserve_common.kernels import library

CPU = torch.device("cpu")
# a video; less than a window; several windows; keys of more than one round, and rows of more than one tile of torch's
GRIDS: list[Grid] = [(2, 6, 10), (1, 2, 2), (1, 4, 26), (1, 26, 22), (1, 2, 2)]


def at_most(cost: float) -> PieceLimits:
    """The same limit for every kind."""
    return lambda kind: cost


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(params=["operators", "torch"])
def by_operators(request):
    choice = "auto" if request.param == "operators" else "off"
    said = library.activate(choice, threads=2)
    assert (library.active() is not None) == (choice == "auto"), said
    return choice == "auto"


def load(folder, dtype: torch.dtype) -> VisionTower:
    tower = load_tower(folder, dtype=dtype)
    pack_linears(tower)
    return tower


def pixels(folder, grids: list[Grid]) -> torch.Tensor:
    """Random patches for some grids, the same each time."""
    count = sum(t * h * w for t, h, w in grids)
    width = math.prod(load_tower(folder).patch_embed.proj.kernel)
    return torch.randn(count, width, generator=torch.Generator().manual_seed(0))


def packed(folder, dtype: torch.dtype, threads: int = 2) -> VisionTower:
    """A checkpoint's tower by the operators."""
    said = library.activate("auto", threads=threads)
    assert library.active() is not None, said
    return load(folder, dtype)


@torch.inference_mode()
def test_float32_is_that_of_torch(folder):
    x = pixels(folder, GRIDS)
    expected = load_tower(folder, dtype=torch.float32)(x, GRIDS)
    torch.testing.assert_close(packed(folder, torch.float32)(x, GRIDS), expected, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_bfloat16_is_as_near_to_float32_as_that_of_torch(folder):
    x, narrow = pixels(folder, GRIDS), load_tower(folder, dtype=torch.bfloat16)
    theirs = narrow(x, GRIDS).float()
    truth = narrow.float()(x, GRIDS)
    ours = packed(folder, torch.bfloat16)(x, GRIDS)
    assert ours.dtype == torch.bfloat16
    assert 0 < (ours.float() - truth).norm() < 1.1 * (theirs - truth).norm()


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_embeddings_do_not_depend_on_batch_mates_or_threads_bit_for_bit(folder, dtype):
    x = pixels(folder, GRIDS)
    together = packed(folder, dtype)(x, GRIDS)
    tower = packed(folder, dtype, threads=1)
    parts = x.split([t * h * w for t, h, w in GRIDS])
    alone = [tower(part, [grid]) for part, grid in zip(parts, GRIDS, strict=True)]
    assert torch.equal(together, torch.cat(alone))


@torch.inference_mode()
def cut(steps: Steps[torch.Tensor]) -> tuple[torch.Tensor, list[Piece]]:
    """The result, and all pieces."""
    pieces = []
    while True:
        try:
            pieces.append(next(steps))
        except StopIteration as end:
            return end.value, pieces


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("most", [1.0, 1e6, 2e7], ids=["smallest", "small", "some"])
def test_the_same_bits(folder, by_operators, dtype, most):
    tower, x = load(folder, dtype), pixels(folder, GRIDS)
    with torch.inference_mode():
        whole = tower(x, GRIDS)
    sliced, pieces = cut(tower.steps(x, GRIDS, at_most(most)))
    assert torch.equal(sliced, whole)
    _, uncut = cut(tower.steps(x, GRIDS, UNLIMITED))
    assert len(pieces) > len(uncut) or not by_operators or most == 2e7


def test_work_that_is_left_and_taken_up_again_beside_others_is_the_same(folder, by_operators):
    """Two batches in turns share a tower's buffers."""
    tower = load(folder, torch.bfloat16)
    patches = random_patches(load_tower(folder))
    runner = TowerRunner(tower, CPU)
    expected = [runner.encode(patches[:3]), runner.encode(patches[3:])]
    both = [runner.steps(part, at_most(1.0)) for part in (patches[:3], patches[3:])]
    found: dict[int, tuple[torch.Tensor, ...]] = {}
    while len(found) < 2:
        for number, steps in enumerate(both):
            with torch.inference_mode():
                try:
                    next(steps)
                except StopIteration as end:
                    found.setdefault(number, end.value)
    for number in range(2):
        assert all(torch.equal(a, b) for a, b in zip(found[number], expected[number], strict=True))


@pytest.mark.parametrize("grid", [(1, 32, 32), (1, 2, 2)])
def test_pieces_cost_together_what_a_picture_does(folder, by_operators, grid):
    tower = load(folder, torch.float32)
    for limits in (at_most(1e6), UNLIMITED):
        _, pieces = cut(tower.steps(pixels(folder, [grid]), [grid], limits))
        costs = Counter[Kind]()
        for piece in pieces:
            costs[piece.kind] += piece.cost
        for kind, cost in encoding_cost(tower, grid[1] * grid[2]).items():
            assert costs[kind] == pytest.approx(cost, rel=0.15 if kind is Kind.ATTENTION else 1e-6)


def test_no_piece_of_the_operators_costs_more_than_the_limit(folder):
    said = library.activate("auto", threads=2)
    assert library.active() is not None, said
    tower, limit = load(folder, torch.bfloat16), 5e7
    _, pieces = cut(tower.steps(pixels(folder, [(1, 60, 60)]), [(1, 60, 60)], at_most(limit)))
    assert max(piece.cost for piece in pieces if piece.kind is not Kind.ELEMENTS) <= limit
    assert len(pieces) > 20


@pytest.mark.parametrize("count", [1, 47, 48, 49, 100, 1000, 7400])
@pytest.mark.parametrize("limit", [0.0, 48.0, 100.0, 1e4, math.inf])
def test_tiles_cover_all_rows_once_and_are_no_larger_than_allowed(count, limit):
    tiles = list(limited_tiles(count, 1.0, at_most(limit), Kind.PRODUCT, most=2048))
    assert [row for tile in tiles for row in range(count)[tile]] == list(range(count))
    assert all(tile.stop - tile.start <= min(2064, max(48, limit)) for tile in tiles)


def test_a_limit_that_changes_holds_from_the_next_tile_on():
    costs = iter([96.0, math.inf])
    tiles = limited_tiles(1000, 1.0, lambda kind: next(costs), Kind.PRODUCT)
    assert next(tiles) == slice(0, 96)
    assert list(tiles) == [slice(96, 1000)]


# ---------------------------------------------------------------- costs


TOWER = {"num_heads": 16, "out_hidden_size": 2048}
QWEN3_VL_2B = TOWER | {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "patch_size": 16}
QWEN3_VL_2B |= {"num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17]}
QWEN2_5_VL = TOWER | {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "patch_size": 14}


def flops(family: str, vision_config: dict, patches: int) -> float:
    config = {"model_type": family, "vision_config": vision_config}
    return encoding_flops(make_tower(config, torch.bfloat16, "meta"), patches)


@pytest.mark.parametrize("patches", [784, 7500])
def test_operations_of_qwen3_vl(patches: int) -> None:
    layer = 4 * 1024**2 + 2 * 1024 * 4096
    mergers = 4 * (4096 * 4096 + 4096 * 2048) / 4
    want = 2 * patches * (3 * 2 * 16 * 16 * 1024 + 24 * layer + mergers) + 24 * 4 * 1024 * patches**2
    assert flops("qwen3_vl", QWEN3_VL_2B, patches) == pytest.approx(want)


def test_windows_are_not_the_whole_picture() -> None:
    layer = 4 * 1280**2 + 3 * 1280 * 3420
    merger = (5120 * 5120 + 5120 * 2048) / 4
    want = 2 * 4096 * (3 * 2 * 14 * 14 * 1280 + 32 * layer + merger) + 4 * 4 * 1280 * 4096**2
    assert flops("qwen2_5_vl", QWEN2_5_VL, 4096) == pytest.approx(want)
