"""Values made of uint8 pixels: every one, every normalization, wherever and however many."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from processors.inputs import Normalization
from processors.normalize import normalize, value_width

CLIP = Normalization(mean=(122.7709, 116.7460, 104.0937), std=(68.5005, 66.6322, 70.3232))


def transformers_values(levels, normalization):
    """torchvision's `normalize`, which its processors end with, on [n, channels, values of a channel]."""
    planes = torch.from_numpy(levels.reshape(len(levels), 3, -1)).float()
    mean, std = (torch.tensor(part, dtype=torch.float32)[:, None] for part in (normalization.mean, normalization.std))
    return planes.sub_(mean).div_(std)


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 300])
@pytest.mark.parametrize("repeat", [1, 2])
def test_they_are_transformers_bit_for_bit(rows, repeat):
    levels = np.random.default_rng(rows).integers(0, 256, (rows, 3 * 256), dtype=np.uint8)
    levels[0] = np.tile(np.arange(256, dtype=np.uint8), 3)
    levels.flags.writeable = False
    normalization = Normalization(mean=CLIP.mean, std=CLIP.std, repeat=repeat)
    made = normalize(levels, normalization)
    assert made.shape == (rows, value_width(levels, normalization)) == (rows, 768 * repeat)
    expected = transformers_values(levels, normalization)
    for frame in made.view(rows, 3, repeat, 256).unbind(dim=2):
        assert torch.equal(frame, expected)


def test_they_are_written_where_they_are_wanted():
    levels = np.random.default_rng(0).integers(0, 256, (200, 12), dtype=np.uint8)
    room = torch.full((202, 12), 7.0)
    assert normalize(levels, CLIP, room[1:-1]).data_ptr() == room[1:].data_ptr()
    assert torch.equal(room[1:-1], normalize(levels, CLIP))
    assert torch.equal(room[[0, -1]], torch.full((2, 12), 7.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_torchs_default_dtype_is_nothing_to_them(dtype):
    levels = np.random.default_rng(0).integers(0, 256, (9, 12), dtype=np.uint8)
    expected = normalize(levels, CLIP)
    torch.set_default_dtype(dtype)
    try:
        made = normalize(levels, CLIP)
    finally:
        torch.set_default_dtype(torch.float32)
    assert made.dtype == torch.float32
    assert torch.equal(made, expected)
