"""Pictures that are resized on the device: the bits of the CPU's, and nothing is waited for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from processors.families.base import ProcessorLimits, data_item
from processors.families.registry import make_processor
from processors.resize import resize_frames
from tests.processors.helpers import noise, picture
from tests.sync_debug import nothing_waits
from vision.towers.device_resize import resize
from vision.towers.runner import pixel_values
from vision.towers.temporal_patch import TemporalPatch, temporal_patches
from vlmserve_common.checkpoint.fields import read_json
from vlmserve_common.compute.transfers import to_device


@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
@pytest.mark.parametrize(
    ("source", "target"),
    [((1, 1), (56, 56)), ((1, 200), (28, 448)), ((333, 517), (336, 532)), ((900, 1200), (448, 616)),
     ((1080, 1920), (704, 1280)), ((1500, 2000), (1504, 2016))],
)  # fmt: skip
def test_bits_of_the_cpu(device, source, target, mode):
    frames = np.stack([noise(source[1], source[0], seed) for seed in range(2)])
    frames[1] = np.where(frames[1] > 127, 255, 0)
    made = resize(to_device(torch.from_numpy(frames), device), *target, mode)
    assert np.array_equal(made.cpu().numpy(), resize_frames(frames, *target, mode))


def patches(folder: Path, *, later: bool) -> list[TemporalPatch]:
    """Of pictures and a clip."""
    processor = make_processor(folder, read_json(folder, "config.json"), ProcessorLimits(resize_later=later))
    media = [processor.process_image(picture(*size)) for size in [(90, 70), (90, 70), (150, 20), (600, 400), (64, 90)]]
    media.append(processor.process_video([picture(113, 85, seed) for seed in range(5)]))
    return [patch for medium in media for patch in temporal_patches(data_item(medium))]


def test_values_of_media(folder, cuda):
    expected, later = (patches(folder, later=later) for later in (False, True))
    pixel_values(later, cuda)  # fills torch's allocators
    with nothing_waits():
        values = pixel_values(later, cuda)
    assert torch.equal(values.cpu(), pixel_values(expected, torch.device("cpu")))
