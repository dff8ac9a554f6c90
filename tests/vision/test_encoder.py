"""The encoder around a tower: packing, and videos in parts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from vision.encoder import VisionEncoder, VisionEncoderLimits


@dataclass(frozen=True)
class Item:
    digest: bytes
    grid_thw: tuple[int, int, int]
    feature: np.ndarray
    encoded: bool = False


class SummingTower:
    """One row for each window of four patches: their sum. Notes the grids of every call."""

    spatial_merge_size = 2

    def __init__(self):
        self.calls = []

    def __call__(self, pixel_values, grid_thw):
        self.calls.append(list(grid_thw))
        assert len(pixel_values) == sum(t * h * w for t, h, w in grid_thw)
        return pixel_values.view(-1, 4, pixel_values.shape[1]).sum(1)


def item(name, grid):
    t, h, w = grid
    values = np.random.default_rng(len(name)).normal(size=(t * h * w, 3)).astype(np.float32)
    return Item(name.encode(), grid, values)


def encode(items, max_patches):
    tower = SummingTower()
    limits = VisionEncoderLimits(max_patches=max_patches, cache_bytes=1 << 20)
    return VisionEncoder(tower, limits, torch.device("cpu")).encode(items), tower.calls


def test_a_long_video_is_encoded_in_whole_temporal_patches():
    video = item("video", (7, 4, 4))
    (rows,), calls = encode([video], 48)
    assert calls == [[(3, 4, 4)], [(3, 4, 4)], [(1, 4, 4)]]
    assert torch.equal(rows, torch.from_numpy(video.feature).view(-1, 4, 3).sum(1))
    assert encode([video], 5)[1] == [[(1, 4, 4)]] * 7  # less than a temporal patch cannot be
    assert encode([video], 112)[1] == [[(7, 4, 4)]]


def test_small_items_are_packed():
    items = [item("a", (1, 4, 4)), item("bb", (2, 4, 2)), item("ccc", (3, 4, 4))]
    rows, calls = encode(items, 48)
    assert calls == [[(1, 4, 4), (2, 4, 2)], [(3, 4, 4)]]
    for one, got in zip(items, rows, strict=True):
        assert torch.equal(got, torch.from_numpy(one.feature).view(-1, 4, 3).sum(1))


def test_items_that_came_encoded_are_passed_on():
    rows = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    rows.flags.writeable = False
    given = Item(b"given", (1, 4, 4), rows, encoded=True)
    plain = item("plain", (1, 4, 4))
    tower = SummingTower()
    encoder = VisionEncoder(tower, VisionEncoderLimits(max_patches=48, cache_bytes=1 << 20), torch.device("cpu"))
    first, second, third = encoder.encode([given, plain, given])
    assert tower.calls == [[(1, 4, 4)]]
    assert torch.equal(first, torch.tensor(rows))
    assert torch.equal(third, first)
    assert not torch.equal(second, first)
    assert (encoder.items_encoded, encoder.cache_hits, encoder.cache.bytes) == (1, 0, second.nbytes)
    (again,) = encoder.encode([given])
    assert again is first, "the next chunk's rows are at hand"
    encoder.encode([plain])
    assert encoder.encode([given])[0] is not first, "and they are not kept longer"
