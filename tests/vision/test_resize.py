"""Resizing on a tower's device: the bits of the CPU's, in launches that wait for nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from processors.resize import RESAMPLING, PatchConfig, frames_to_patches, resize_frames
from tests.fake_cuda.tensors import CUDA, FakeCuda
from tests.processors.helpers import noise
from vision.towers import device_resize as module
from vision.towers.device_resize import make_taps, original_patches, resize
from vlmserve_common.compute.transfers import to_device

MODES = sorted(RESAMPLING.values())
SIDES = st.one_of(st.integers(1, 12), st.integers(1, 400))


def pixels(frames: int, height: int, width: int, seed: int) -> np.ndarray:
    """uint8 [frames, height, width, 3]: noise, every other time of black and white alone, which overshoots most."""
    made = np.random.default_rng(seed).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)
    return np.where(made > 127, 255, 0).astype(np.uint8) if seed % 2 else made


def check(frames: np.ndarray, height: int, width: int, mode: str) -> None:
    made = resize(torch.from_numpy(frames), height, width, mode)
    assert made.dtype == torch.uint8
    assert np.array_equal(made.numpy(), resize_frames(frames, height, width, mode)), (frames.shape, height, width, mode)


@settings(max_examples=150, deadline=None)
@given(
    source=st.tuples(SIDES, SIDES),
    target=st.tuples(SIDES, SIDES),
    frames=st.integers(1, 3),
    mode=st.sampled_from(MODES),
    seed=st.integers(0, 2**32),
)
def test_bits_of_the_cpu(source, target, frames, mode, seed):
    check(pixels(frames, *source, seed), *target, mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("source", "target"),
    [((1, 1), (56, 56)), ((1, 200), (28, 448)), ((2000, 10), (1988, 28)), ((64, 64), (64, 32)), ((64, 64), (32, 64)),
     ((900, 1200), (896, 1184)), ((448, 448), (224, 224)), ((7, 5000), (28, 2520))],
)  # fmt: skip
def test_bits_of_pictures_and_strips(source, target, mode):
    check(noise(source[1], source[0])[None], *target, mode)


@pytest.mark.parametrize("most", [1, 5_000, 100_000])
def test_outputs_may_be_computed_in_parts(monkeypatch, most):
    monkeypatch.setattr(module, "_MOST_SUMS", most)
    check(pixels(2, 61, 90, 1), 56, 112, "bicubic")


def test_few_taps_where_sides_are_at_most_halved():
    most = {"bicubic": (4, 8), "bilinear": (2, 4)}
    for mode, (larger, halved) in most.items():
        assert make_taps(250, 500, mode).table.shape == (2, larger, 500)
        assert max(make_taps(source, 500, mode).table.shape[1] for source in range(501, 1001)) == halved


@pytest.mark.parametrize(("patch", "depth"), [(14, 1), (14, 2), (16, 1), (16, 2)])
def test_patches_are_those_of_the_cpu(patch, depth):
    config = PatchConfig(
        patch_size=patch, merge_size=2, temporal_patch_size=2, mean=(0.0,) * 3, std=(1.0,) * 3, resample="bicubic"
    )
    grid = (6, 10)
    frames = [pixels(depth, 75, 131, seed) for seed in range(3)]
    made = original_patches(torch.from_numpy(np.stack(frames)), grid, config.resizing)
    resized = [resize_frames(one, grid[0] * patch, grid[1] * patch, config.resample) for one in frames]
    assert np.array_equal(made.numpy(), np.concatenate([frames_to_patches(one, config)[0] for one in resized]))


def test_nothing_waits_and_little_is_launched():
    config = PatchConfig(patch_size=14, merge_size=2, temporal_patch_size=2, mean=(0.0,) * 3, std=(1.0,) * 3)
    frames = pixels(1, 150, 200, 2)[None]
    with FakeCuda() as cuda:
        original_patches(to_device(torch.from_numpy(frames), CUDA), (10, 14), config.resizing)
    assert not cuda.counts.syncs
    assert cuda.counts.uploads == 2, "pixels, and the weights of both axes"
    assert cuda.counts.upload_bytes == frames.nbytes + 8 * (5 * 196 + 5 * 140)
    assert sum(cuda.counts.launches.values()) <= 2 * (2 * 5 + 4) + 1, cuda.counts.launches
