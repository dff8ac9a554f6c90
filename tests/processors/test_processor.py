"""From checkpoint folder, prompt and pictures to engine input; knobs, budgets and bad requests."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from processors.families.registry import make_processor
from processors.hashing import digest_fields, media_digest, patch_digest
from processors.inputs import Modality
from tests import hf_env  # noqa: F401
from tests.processors.helpers import (
    FAMILIES,
    IMAGE_PAD,
    VISION_END,
    VISION_START,
    hf_config,
    picture,
    preprocessor_config,
    tiny_processor,
    write_checkpoint,
)
from vlmserve_common.errors import CheckpointError


@pytest.fixture(scope="module", params=FAMILIES)
def processor(request, tmp_path_factory):
    return tiny_processor(tmp_path_factory.mktemp(request.param), request.param)


# ---------------------------------------------------------------- expansion


@settings(max_examples=60, deadline=None)
@given(texts=st.lists(st.integers(0, 4), min_size=1, max_size=5), marks=st.booleans(), data=st.data())
def test_expansion(processor, texts, marks, data):
    """Each placeholder becomes h*w/4 pads, everything else stays, offsets point at the pads."""
    prompt, images = [], []
    for index, text in enumerate(texts):
        prompt += [7 + index] * text
        if index < len(texts) - 1:
            prompt += [VISION_START, IMAGE_PAD, VISION_END] if marks else [IMAGE_PAD]
            side = data.draw(st.sampled_from([28, 60, 100]))
            images.append(picture(side, 64, index))
    ids, media = processor.process(prompt, images)
    assert ids.dtype == np.int64
    assert [x for x in ids.tolist() if x != IMAGE_PAD] == [x for x in prompt if x != IMAGE_PAD]
    if not images:
        assert media is None
        return
    covered = np.zeros(len(ids), bool)
    for item, image in zip(media.items, images, strict=True):
        alone = processor.process_image(image)
        ((start, end),) = item.offsets
        assert item.modality is Modality.IMAGE
        assert item.grid_thw == alone.grid_thw
        assert end - start == item.num_tokens == alone.num_tokens == item.feature.shape[0] // 4
        assert item.digest == alone.digest
        assert np.array_equal(item.feature, alone.feature)
        covered[start:end] = True
    assert np.array_equal(covered, ids == IMAGE_PAD)
    assert media.mrope_positions.shape == (3, len(ids))
    assert media.mrope_positions.dtype == np.int64
    assert media.mrope_position_delta == media.mrope_positions.max() + 1 - len(ids)


# ---------------------------------------------------------------- identity


def test_digests_frame_every_field():
    one, two = b"1" * 32, b"2" * 32
    digests = {
        media_digest(Modality.IMAGE, (1, 4, 4), (one,)),
        media_digest(Modality.VIDEO, (1, 4, 4), (one,)),
        media_digest(Modality.IMAGE, (1, 2, 8), (one,)),
        media_digest(Modality.IMAGE, (1, 4, 4), (two,)),
        media_digest(Modality.VIDEO, (2, 4, 4), (one, two)),
        media_digest(Modality.VIDEO, (2, 4, 4), (two, one)),
    }
    assert len(digests) == 6
    assert digest_fields([b"ab", b"c"]) != digest_fields([b"a", b"bc"])
    assert digest_fields([b"", b"a"]) != digest_fields([b"a", b""])


def test_a_temporal_patch_is_known_by_its_pixels_grid_and_cutting(processor):
    patches = processor.config.patches
    frames = np.random.default_rng(0).integers(0, 256, (2, 3, 28, 56)).astype(np.uint8)
    base = patch_digest((2, 4), frames, patches)
    other = frames.copy()
    other[1, 2, 27, 55] ^= 1
    others = [
        patch_digest((2, 4), other, patches),
        patch_digest((2, 4), frames[::-1], patches),
        patch_digest((2, 4), frames[:1], patches),
        patch_digest((4, 2), frames, patches),
        patch_digest((2, 4), frames.reshape(2, 3, 56, 28), patches),
        patch_digest((2, 4), frames, replace(patches, mean=(0.5, 0.5, 0.25))),
        patch_digest((2, 4), frames, replace(patches, std=(0.5, 0.5, 0.25))),
        patch_digest((2, 4), frames, replace(patches, rescale_factor=1 / 127)),
        patch_digest((2, 4), frames, replace(patches, patch_size=7)),
    ]
    assert len({base, *others}) == 10
    assert patch_digest((2, 4), np.asfortranarray(frames), patches) == base
    still = np.concatenate([frames[:1], frames[:1]])
    picture_alone = patch_digest((2, 4), frames[:1], patches)
    assert patch_digest((2, 4), still, patches) == picture_alone, "a still clip is a picture"


# ---------------------------------------------------------------- checkpoint settings


def settings_of(folder, raw, family="qwen2_vl", name="preprocessor_config.json", **changes):
    (folder / name).write_text(json.dumps(raw) if not isinstance(raw, str) else raw)
    return make_processor(folder, {**hf_config(family), **changes}).config


@pytest.mark.parametrize(
    "raw",
    [
        {"min_pixels": 1568, "max_pixels": 39200},
        {"size": {"shortest_edge": 1568, "longest_edge": 39200}},
        {"size": {"min_pixels": 1568, "max_pixels": 39200}},
        {"min_pixels": 1568, "size": {"shortest_edge": 99, "longest_edge": 39200}},
        {"min_pixels": None, "max_pixels": None, "size": {"shortest_edge": 1568, "longest_edge": 39200}},
    ],
)
def test_budget_in_every_spelling(tmp_path, raw):
    config = settings_of(tmp_path, raw)
    assert (config.min_pixels, config.max_pixels) == (1568, 39200)


@pytest.mark.parametrize("raw", [{}, {"min_pixels": 1568}, preprocessor_config("qwen2_vl")])
def test_settings_are_those_transformers_loads(tmp_path, raw):
    from transformers import Qwen2VLImageProcessor

    config = settings_of(tmp_path, raw)
    reference = Qwen2VLImageProcessor.from_pretrained(tmp_path)
    assert config.min_pixels == reference.size["shortest_edge"]
    assert config.max_pixels == reference.size["longest_edge"]
    assert list(config.patches.mean) == list(reference.image_mean)
    assert list(config.patches.std) == list(reference.image_std)
    for name in ("patch_size", "merge_size", "temporal_patch_size", "rescale_factor"):
        assert getattr(config.patches, name) == getattr(reference, name)


def test_settings_nested_in_processor_config_come_first(tmp_path):
    write_checkpoint(tmp_path, "qwen2_vl")
    config = settings_of(tmp_path, {"image_processor": {"max_pixels": 7840}}, name="processor_config.json")
    assert config.max_pixels == 7840
    config = settings_of(tmp_path, {"processor_class": "x"}, name="processor_config.json")
    assert config.max_pixels == 50176


def test_token_ids_come_from_the_config_or_are_the_published_ones(tmp_path):
    assert settings_of(tmp_path, {}, image_token_id=3).token_ids.image_pad == 3
    write_checkpoint(tmp_path, "qwen2_vl")
    ids = make_processor(tmp_path, {"model_type": "qwen2_vl"}).token_ids
    assert (ids.vision_start, ids.vision_end, ids.image_pad, ids.video_pad) == (151652, 151653, 151655, 151656)


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        ("{broken", "is not JSON"),
        ("[]", "a JSON object is expected, not list"),
        ({"do_normalize": False}, "do_normalize false is not supported"),
        ({"do_resize": False}, "do_resize false"),
        ({"resample": 1}, "resample 1, supported are"),
        ({"min_pixels": 100, "max_pixels": 50}, "no range"),
        ({"min_pixels": 0}, "no range"),
        ({"image_mean": [0.5]}, "three values"),
        ({"image_std": [0.5, 0.0, 0.5]}, "none of std zero"),
        ({"patch_size": 16}, "patch_size is 16 here but 14 in config.json"),
        ({"merge_size": 4}, "merge_size is 4 here but 2"),
        ({"temporal_patch_size": 1}, "temporal_patch_size is 1 here but 2"),
        ({"patch_size": "big"}, "unusable picture settings"),
        ({"size": 5}, "unusable picture settings"),
    ],
)
def test_unusable_settings_are_named(tmp_path, raw, match):
    with pytest.raises(CheckpointError, match=match) as caught:
        settings_of(tmp_path, raw)
    assert "preprocessor_config.json" in str(caught.value)


def test_a_folder_without_settings(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no preprocessor_config\.json"):
        make_processor(tmp_path, hf_config("qwen2_vl"))


@pytest.mark.parametrize("model_type", ["llama", None, ["qwen2_vl"]])
def test_an_unknown_family(tmp_path, model_type):
    write_checkpoint(tmp_path, "qwen2_vl")
    known = r"\['qwen2', 'qwen2_5_omni', 'qwen2_5_vl', 'qwen2_vl', 'qwen3', 'qwen3_5', 'qwen3_5_moe', "
    with pytest.raises(CheckpointError, match=f"not supported, only {known}"):
        make_processor(tmp_path, {"model_type": model_type})


def test_qwen2_5_vl_needs_tokens_per_second(tmp_path):
    write_checkpoint(tmp_path, "qwen2_5_vl")
    with pytest.raises(CheckpointError, match="tokens_per_second"):
        make_processor(tmp_path, {"model_type": "qwen2_5_vl"})
