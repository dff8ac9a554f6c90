"""Towers on the device, against the same on the CPU and transformers' there."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.vision.patches import GRIDS, make_levels, random_patches
from tests.vision.test_towers import reference_rows
from vision.towers.loading import load_tower
from vision.towers.runner import TowerRunner, pixel_values
from vlmserve.commands.bench.reference import check_rows


@dataclass(frozen=True)
class Truth:
    """Patches, and their rows [n, width] on the CPU in float32: ours and transformers'."""

    patches: list
    ours: torch.Tensor
    theirs: torch.Tensor


@pytest.fixture(scope="module")
def truth(folder: Path) -> Truth:
    from transformers import AutoModelForImageTextToText

    tower = load_tower(folder)
    patches = random_patches(tower)
    visual = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval().model.visual
    pixels = pixel_values(patches, torch.device("cpu"))
    theirs = reference_rows(visual, pixels, [(1, *grid) for grid in GRIDS])
    return Truth(patches, torch.cat(TowerRunner(tower, torch.device("cpu")).encode(patches)), theirs)


def test_rows_in_float32(folder, device, truth):
    runner = TowerRunner(load_tower(folder, device=device), device)
    rows = runner.encode(truth.patches)
    assert {part.device.type for part in rows} == {device.type}
    assert all(part.untyped_storage().nbytes() == part.nbytes for part in rows), "memory of its own"
    values = pixel_values(truth.patches, device).cpu()
    assert torch.equal(values, pixel_values(truth.patches, torch.device("cpu"))), "bit for bit"
    packed = torch.cat(rows).cpu()
    torch.testing.assert_close(packed, truth.ours, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(packed, truth.theirs, rtol=1e-4, atol=1e-4)


def test_rows_alone_are_those_of_a_packed_batch(folder, device, truth):
    runner = TowerRunner(load_tower(folder, device=device), device)
    for patch, packed in zip(truth.patches, runner.encode(truth.patches), strict=True):
        torch.testing.assert_close(runner.encode([patch])[0], packed, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_in_16_bits_are_near(folder, device, truth, dtype):
    runner = TowerRunner(load_tower(folder, device=device, dtype=dtype), device)
    rows = torch.cat(runner.encode(truth.patches)).cpu()
    assert rows.dtype == dtype
    assert check_rows(rows, truth.theirs.to(dtype)) > 0  # raises when they are further off than rounding takes them


def test_grids_that_do_not_fit_leave_the_device_usable(folder, device, truth):
    runner = TowerRunner(load_tower(folder, device=device), device)
    odd = make_levels((3, 4), truth.patches[0].pixels.shape[1])
    with pytest.raises(ValueError, match="multiples of 2"):
        runner.encode_packed([*truth.patches, odd])
    torch.testing.assert_close(torch.cat(runner.encode(truth.patches)).cpu(), truth.theirs, rtol=1e-4, atol=1e-4)
