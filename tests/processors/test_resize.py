"""Sizes, pixels and patch order, against transformers and qwen_vl_utils."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from processors.inputs import Normalization
from processors.knobs import ImageKnobs
from processors.normalize import normalize
from processors.resize import resize_frames, smart_resize, smart_resize_clip
from tests import hf_env  # noqa: F401
from tests.processors.helpers import FAMILIES, noise, picture, preprocessor_config, tiny_processor, values
from vlmserve_common.errors import BadRequestError

SIDES = st.integers(1, 3000)
SIZES = [(1, 1), (1, 200), (200, 1), (3, 600), (56, 56), (57, 55), (28, 28), (64, 64), (9, 14), (101, 67), (67, 101),
         (199, 150), (800, 600), (600, 800), (2000, 10), (30, 1999), (224, 224), (13, 1000), (320, 33)]  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(
    height=SIDES,
    width=SIDES,
    factor=st.sampled_from([28, 32]),
    low=st.integers(1, 200_000),
    more=st.integers(0, 2_000_000),
)
def test_smart_resize_is_transformers(height, width, factor, low, more):
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import smart_resize as reference

    try:
        expected = reference(height, width, factor, low, low + more)
    except ValueError:
        with pytest.raises(BadRequestError, match="aspect ratio"):
            smart_resize(height, width, factor=factor, min_pixels=low, max_pixels=low + more)
        return
    size = smart_resize(height, width, factor=factor, min_pixels=low, max_pixels=low + more)
    assert size == expected
    assert size[0] % factor == size[1] % factor == 0


@pytest.mark.parametrize(("width", "height"), [(201, 1), (1, 201), (2010, 10), (20, 4001)])
def test_a_ratio_above_200_is_refused_with_its_figures(width, height):
    with pytest.raises(BadRequestError, match=f"{width}x{height} pixels.*limit is 200") as caught:
        smart_resize(height, width, factor=28, min_pixels=3136, max_pixels=50176)
    assert caught.value.status == 400


@pytest.mark.parametrize("family", FAMILIES)
def test_patches_are_bit_equal_to_transformers(family, tmp_path):
    from transformers import Qwen2VLImageProcessor

    reference = Qwen2VLImageProcessor(**preprocessor_config(family))
    processor = tiny_processor(tmp_path, family)
    for seed, (width, height) in enumerate(SIZES):
        image = picture(width, height, seed)
        expected = reference(images=[image], return_tensors="pt")
        ours = processor.process_image(image)
        assert list(ours.grid_thw) == expected["image_grid_thw"][0].tolist(), (width, height)
        assert np.array_equal(values(ours), expected["pixel_values"].numpy()), (width, height)
        assert ours.num_tokens == math.prod(ours.grid_thw) // 4


def test_bilinear_resampling_is_transformers():
    """As is bicubic, which all families have."""
    from torchvision.transforms.v2 import functional as tv

    pixels = noise(90, 61)
    planes = torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
    expected = tv.resize(planes, [56, 112], interpolation=tv.InterpolationMode.BILINEAR, antialias=True)
    assert np.array_equal(resize_frames(pixels[None], 56, 112, "bilinear")[0], expected.permute(1, 2, 0).numpy())


@pytest.mark.parametrize(("width", "height"), [(300, 200), (31, 90), (224, 224), (1, 1), (640, 23)])
def test_qwen_vl_utils_gives_the_same_sizes_and_nearly_the_same_pixels(width, height, tmp_path):
    """qwen_vl_utils resizes with Pillow, which rounds differently: a level or two on pictures of full contrast.

    Where the picture has its final size already, nothing is resampled and the pixels are equal.
    """
    from qwen_vl_utils import process_vision_info

    low, high = 4 * 28 * 28, 64 * 28 * 28
    image = picture(width, height)
    content = [{"type": "image", "image": image, "min_pixels": low, "max_pixels": high}]
    (theirs,), _ = process_vision_info([{"role": "user", "content": content}], image_patch_size=14)
    processor = tiny_processor(tmp_path, "qwen2_vl", min_pixels=low, max_pixels=high)
    assert processor.sizes.fit(height, width, ImageKnobs())[:2] == (theirs.height, theirs.width)
    ours = resize_frames(np.array(image)[None], theirs.height, theirs.width, "bicubic")[0]
    difference = np.abs(ours.astype(int) - np.asarray(theirs).astype(int)).max()
    assert difference <= (0 if (theirs.width, theirs.height) == (width, height) else 2)


@pytest.mark.parametrize(("width", "height"), [(4000, 16), (16, 4000), (500, 2)])
def test_a_clip_that_is_too_long_a_strip_is_named_by_its_own_size(width, height):
    """Though its ratio is that of a larger one, as in the reference."""
    with pytest.raises(BadRequestError, match=f"of {width}x{height} pixels has an aspect ratio of 250.0"):
        smart_resize_clip(4, height, width, factor=32, min_pixels=1, max_pixels=10**9)


# ---------------------------------------------------------------- values made of uint8 pixels


CLIP = Normalization(mean=(122.7709, 116.7460, 104.0937), std=(68.5005, 66.6322, 70.3232))


def test_they_are_written_where_they_are_wanted():
    levels = np.random.default_rng(0).integers(0, 256, (200, 12), dtype=np.uint8)
    room = torch.full((202, 12), 7.0)
    assert normalize(levels, CLIP, room[1:-1]).data_ptr() == room[1:].data_ptr()
    assert torch.equal(room[1:-1], normalize(levels, CLIP))
    assert torch.equal(room[[0, -1]], torch.full((2, 12), 7.0))
