"""Resizing on a tower's device: the bits of the CPU's, in launches that wait for nothing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from processors.families.base import MultimodalProcessor, ProcessedMedium, ProcessorLimits
from processors.families.registry import make_processor
from processors.inputs import Resizing
from processors.knobs import ImageKnobs
from processors.resize import RESAMPLING, PatchConfig, resize_frames
from processors.video.options import VideoKnobs, VideoOptions
from tests.fake_cuda.tensors import CUDA, FakeCuda
from tests.processors.clips import make_clip
from tests.processors.helpers import picture
from tests.tiny_checkpoints import FAMILIES, make_checkpoint
from tests.vision.patches import patches_of
from vision.towers import device_resize as module
from vision.towers.device_resize import original_patches, resize
from vision.towers.runner import pixel_values
from vlmserve_common.checkpoint.fields import read_json
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


@settings(max_examples=80, deadline=None)
@given(
    source=st.tuples(SIDES, SIDES),
    target=st.tuples(SIDES, SIDES),
    frames=st.integers(1, 3),
    mode=st.sampled_from(MODES),
    seed=st.integers(0, 2**32),
)
def test_bits_of_the_cpu(source, target, frames, mode, seed):
    check(pixels(frames, *source, seed), *target, mode)


@pytest.mark.parametrize("most", [1, 5_000, 100_000])
def test_outputs_may_be_computed_in_parts(monkeypatch, most):
    monkeypatch.setattr(module, "_MOST_SUMS", most)
    check(pixels(2, 61, 90, 1), 56, 112, "bicubic")


def test_nothing_waits_and_little_is_launched():
    config = PatchConfig(patch_size=14, merge_size=2, temporal_patch_size=2, mean=(0.0,) * 3, std=(1.0,) * 3)
    frames = pixels(1, 150, 200, 2)[None]
    with FakeCuda() as cuda:
        original_patches(to_device(torch.from_numpy(frames), CUDA), (10, 14), config.resizing)
    assert not cuda.counts.syncs
    assert cuda.counts.uploads == 2, "pixels, and the weights of both axes"
    assert cuda.counts.upload_bytes == frames.nbytes + 8 * (5 * 196 + 5 * 140)
    assert sum(cuda.counts.launches.values()) <= 2 * (2 * 5 + 4) + 1, cuda.counts.launches


# ---------------------------------------------------------------- pictures and clips that travel as they were decode


CPU = torch.device("cpu")
SIZES = [(1, 1), (90, 70), (57, 55), (101, 67), (150, 20), (230, 150)]


@pytest.fixture(scope="module", params=FAMILIES)
def processors(request, tmp_path_factory) -> tuple[MultimodalProcessor, MultimodalProcessor]:
    """A checkpoint's that resizes, and one that leaves it to others."""
    folder = make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))
    return tuple(
        make_processor(folder, read_json(folder, "config.json"), ProcessorLimits(resize_later=later))
        for later in (False, True)
    )


def assert_same(now: ProcessedMedium, later: ProcessedMedium) -> None:
    """But for pixels, which are yet to be made, and what they are known by."""
    assert now.resizing is None
    assert isinstance(later.resizing, Resizing)
    assert now.feature.nbytes * 4 >= later.feature.nbytes
    assert not later.feature.flags.writeable
    names = {field.name for field in dataclasses.fields(now)} - {"feature", "resizing", "digest", "patch_digests"}
    assert {name: getattr(now, name) for name in names} == {name: getattr(later, name) for name in names}
    assert torch.equal(pixel_values(patches_of(later), CPU), pixel_values(patches_of(now), CPU))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_pictures(processors, size):
    now, later = (processor.process_image(picture(*size)) for processor in processors)
    assert_same(now, later)
    assert later.feature.shape == (1, size[1], size[0], 3)


@pytest.mark.parametrize("frames", [1, 5, 6])
def test_clips_and_lists_of_frames(processors, frames):
    clip = make_clip(frames, width=113, height=85, fps=2)
    assert_same(*(processor.process_video(clip) for processor in processors))
    listed = [picture(113, 85, seed) for seed in range(frames)]
    assert_same(*(processor.process_video(listed) for processor in processors))


def test_a_clip_in_stretches(processors):
    data = make_clip(400, width=57, height=45, fps=10, gop=40)
    knobs = VideoKnobs(fps=9, max_frames=380)
    assert_same(*(processor.process_video(data, knobs) for processor in processors))


def test_a_batch_of_all_kinds(processors):
    """Packed in their order, whatever is computed together."""
    images = [picture(*size, seed) for seed, size in enumerate([(90, 70), (90, 70), (33, 64), (64, 64), (600, 400)])]
    now, later = (
        [processor.process_image(image) for image in images] + [processor.process_video(images[:2])]
        for processor in processors
    )
    assert len({medium.resizing is None for medium in later}) == 2
    expected = pixel_values([patch for medium in now for patch in patches_of(medium)], CPU)
    mixed = [patch for medium in later for patch in patches_of(medium)]
    assert torch.equal(pixel_values(mixed, CPU), expected)
    with FakeCuda() as cuda:
        values = pixel_values(mixed, CUDA)
    assert not cuda.counts.syncs
    assert torch.equal(values.inner, expected)


@pytest.mark.parametrize(
    ("size", "resized", "later"),
    [((224, 224), (224, 224), False), ((224, 225), (224, 224), True), ((448, 448), (224, 224), True),
     ((449, 10), (224, 224), False), ((10, 449), (224, 224), False), ((10, 10), (448, 448), True)],
)  # fmt: skip
def test_only_what_shrinks_little(processors, size, resized, later):
    """Sizes are (width, height)."""
    knobs = ImageKnobs(resized_width=resized[0], resized_height=resized[1])
    one, other = (processor.process_image(picture(*size), knobs) for processor in processors)
    assert other.grid_thw == one.grid_thw
    assert (other.resizing is not None) == later
    assert (other.digest != one.digest) == later


def test_only_what_there_is_memory_for(processors, monkeypatch):
    _, later = processors
    clip = make_clip(6, width=113, height=85, fps=2)
    assert later.process_video(clip).resizing
    monkeypatch.setattr("processors.resize.MOST_ORIGINAL_BYTES", 6 * 113 * 85 * 3 - 1)
    assert later.process_video(clip).resizing is None
    assert later.process_image(picture(113, 85)).resizing


def test_not_what_is_resized_in_floats(tmp_path):
    """As qwen_vl_utils does with videos."""
    folder = make_checkpoint("qwen2_vl", tmp_path)
    limits = ProcessorLimits(resize_later=True, video_options=VideoOptions(sampling="qwen-vl-utils"))
    processor = make_processor(folder, read_json(folder, "config.json"), limits)
    assert processor.process_video([picture(113, 85)] * 2).resizing is None
    assert processor.process_image(picture(113, 85)).resizing


def test_a_clip_whose_frames_change_their_size_is_read_again(processors, monkeypatch):
    from processors.video.decoding import Clip

    read = Clip.read

    def changing(clip, indices, threads=1):
        for number, frame in enumerate(read(clip, indices, threads)):
            yield np.ascontiguousarray(frame[:-8]) if number == 3 else frame

    monkeypatch.setattr(Clip, "read", changing)
    now, later = (processor.process_video(make_clip(6, width=113, height=85, fps=2)) for processor in processors)
    assert later.resizing is None
    assert later == dataclasses.replace(now, feature=later.feature)
    assert np.array_equal(later.feature, now.feature)


def test_what_originals_are_known_by(processors):
    _, later = processors
    image = picture(90, 70)
    made = later.process_image(image)
    digests = {
        made.digest,
        later.process_image(picture(90, 70, 1)).digest,
        later.process_image(picture(91, 70)).digest,
        later.process_image(image, ImageKnobs(max_pixels=3500)).digest,
        later.process_video([image]).digest,
        processors[0].process_image(image).digest,
    }
    assert len(digests) == 6
    assert later.process_image(image).digest == made.digest
    assert later.process_video([image, image]).patch_digests == later.process_video([image]).patch_digests
