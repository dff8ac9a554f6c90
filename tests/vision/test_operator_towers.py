"""Whole towers by our operators: torch's answer in float32, as near to it in bfloat16, whatever else is encoded."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.tiny_checkpoints import FAMILIES, make_checkpoint
from vision.towers.blocks import VisionTower
from vision.towers.grids import Grid
from vision.towers.loading import load_tower
from vlmserve_common.compute.linear import pack_linears
from vlmserve_common.kernels import library

# a video; less than a window; several windows; keys of more than one round
GRIDS: list[Grid] = [(2, 6, 10), (1, 2, 2), (1, 4, 26), (1, 26, 22)]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(autouse=True)
def _off_afterwards():
    yield
    library.activate("off", threads=1)


def packed(folder: Path, dtype: torch.dtype, threads: int = 2) -> VisionTower:
    """A checkpoint's tower by the operators."""
    said = library.activate("auto", threads=threads)
    assert library.active() is not None, said
    tower = load_tower(folder, dtype=dtype)
    pack_linears(tower)
    return tower


def pixels(tower: VisionTower, grids: list[Grid]) -> torch.Tensor:
    """Random patches for some grids, the same each time."""
    count = sum(t * h * w for t, h, w in grids)
    width = math.prod(tower.patch_embed.proj.kernel)
    return torch.randn(count, width, generator=torch.Generator().manual_seed(0))


@torch.inference_mode()
def test_float32_is_that_of_torch(folder):
    tower = load_tower(folder, dtype=torch.float32)
    expected = tower(pixels(tower, GRIDS), GRIDS)
    tower = packed(folder, torch.float32)
    torch.testing.assert_close(tower(pixels(tower, GRIDS), GRIDS), expected, rtol=1e-4, atol=1e-5)


@torch.inference_mode()
def test_bfloat16_is_as_near_to_float32_as_that_of_torch(folder):
    narrow = load_tower(folder, dtype=torch.bfloat16)
    x = pixels(narrow, GRIDS)
    theirs = narrow(x, GRIDS).float()
    truth = narrow.float()(x, GRIDS)
    ours = packed(folder, torch.bfloat16)(x, GRIDS)
    assert ours.dtype == torch.bfloat16
    assert 0 < (ours.float() - truth).norm() < 1.1 * (theirs - truth).norm()


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_embeddings_do_not_depend_on_batch_mates_or_threads_bit_for_bit(folder, dtype):
    tower = packed(folder, dtype)
    x = pixels(tower, GRIDS)
    together = tower(x, GRIDS)
    tower = packed(folder, dtype, threads=1)
    parts = x.split([t * h * w for t, h, w in GRIDS])
    alone = [tower(part, [grid]) for part, grid in zip(parts, GRIDS, strict=True)]
    assert torch.equal(together, torch.cat(alone))
