"""Batches in this process: rows are the tower's, each with memory of its own, and failures are results."""

from __future__ import annotations

import gc
import math
import re
import weakref
from dataclasses import replace

import pytest
import torch

from tests.tiny_checkpoints import make_checkpoint
from tests.vision.patches import make_levels, random_patches
from vision.towers.loading import load_tower
from vision.towers.pieces import Kind, Piece
from vision.towers.runner import TowerRunner, pixel_values
from vision.towers.temporal_patch import EncodeBatch
from vision.workers.inline import InlineBackend

CPU = torch.device("cpu")


@torch.inference_mode()
def directly(tower, patch):
    """The rows of one temporal patch by a call of its own."""
    return tower(pixel_values([patch], CPU), [(1, *patch.grid)])


def test_rows_have_memory_of_their_own(small):
    for rows in TowerRunner(small, CPU).encode(random_patches(small)):
        assert rows.untyped_storage().nbytes() == rows.nbytes


@pytest.fixture
def small(tmp_path):
    return load_tower(make_checkpoint("qwen2_vl", tmp_path))


@pytest.mark.parametrize(
    ("patches", "message"),
    [
        ([make_levels((4, 4), 1176), make_levels((3, 4), 1176)], r"ValueError: grid \(1, 3, 4\): .* multiples of 2"),
        ([make_levels((4, 4), 1176), make_levels((4, 4), 1170)], "ValueError: .*not of one tower"),
        ([make_levels((4, 4), 1170)], "RuntimeError: .*shape"),
    ],
    ids=["grid", "unlike-widths", "width"],
)
def test_a_failure_is_the_result_of_its_batch_alone(small, patches, message):
    backend = InlineBackend(TowerRunner(small, CPU))
    good = make_levels((4, 4), 1176)
    backend.start(0, EncodeBatch(number=1, patches=tuple(patches)))
    backend.start(0, EncodeBatch(number=2, patches=(good,)))
    backend.work(math.inf)
    failed, done = sorted(backend.collect(), key=lambda result: result.number)  # the shortest goes first
    assert (failed.number, failed.embeds) == (1, None)
    assert re.match(message, failed.error)
    assert torch.equal(done.embeds[0], directly(small, good))


def test_pixels_of_another_grid_are_refused_though_the_batch_has_as_many_as_it_should(small):
    wide, tall = make_levels((4, 6), 1176), make_levels((2, 4), 1176)
    swapped = [
        replace(wide, pixels=tall.pixels),
        replace(tall, pixels=wide.pixels),
    ]
    with pytest.raises(ValueError, match=r"grid \(4, 6\) has 24 patches, not 8"):
        TowerRunner(small, CPU).encode(swapped)


def test_out_of_memory_frees_the_failed_batch_before_the_cache_is_emptied(small, monkeypatch):
    left = []

    class Full(TowerRunner):
        def steps(self, patches, limits):
            held = torch.zeros(3)
            yield Piece(Kind.PRODUCT, 1.0)
            left.append(weakref.ref(held))
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 MiB")

    emptied = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(left[-1]() is None))
    backend = InlineBackend(Full(small, CPU))
    backend.start(0, EncodeBatch(number=1, patches=(make_levels((2, 2), 1176),)))
    gc.disable()
    try:
        backend.work(math.inf)
    finally:
        gc.enable()
    [result] = backend.collect()
    assert result.error == "OutOfMemoryError: CUDA out of memory. Tried to allocate 20 MiB"
    assert emptied == [True]
