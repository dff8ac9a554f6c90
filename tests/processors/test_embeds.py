"""What is refused of pictures that come encoded, and what it says was expected."""

from __future__ import annotations

import json
import pickle
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import save

from processors.embeds import EmbedsShape, GridLimits, check_embeds, check_times, parse_embeds
from processors.hashing import embeds_digest
from processors.inputs import Modality
from vlmserve_common.errors import BadRequestError

LIMITS = GridLimits(merge_size=2, patch_size=16, max_pixels=128 * 128)
PLAIN, DEEP = EmbedsShape(width=8), EmbedsShape(width=8, deepstack=2)
GRID = torch.tensor([[1, 4, 6]])


def rows(tokens=6, width=8, dtype=torch.float32, seed=0):
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def refused(given, match, shape=PLAIN):
    with pytest.raises(BadRequestError, match=match) as caught:
        check_embeds(given, shape, LIMITS)
    assert (caught.value.status, caught.value.code) == (400, "invalid_image_embeds")


def test_rows_and_grid():
    given = rows()
    got, grid = check_embeds({"image_embeds": given, "image_grid_thw": GRID}, PLAIN, LIMITS)
    assert grid == (1, 4, 6)
    assert np.array_equal(got, given.numpy())
    assert not got.flags.writeable
    given[0, 0] = 9
    assert got[0, 0] != 9, "the giver's memory is its own"


def test_deepstack_rows_in_either_layout():
    main, deep = rows(), torch.stack([rows(seed=1), rows(seed=2)])
    apart, _ = check_embeds({"image_embeds": main, "deepstack_embeds": deep, "image_grid_thw": GRID}, DEEP, LIMITS)
    joined, _ = check_embeds({"image_embeds": torch.cat([main, *deep], 1), "image_grid_thw": GRID}, DEEP, LIMITS)
    assert np.array_equal(apart, joined)
    assert np.array_equal(apart[:, 8:16], deep[0])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"image_embeds": None}, "image_embeds is missing"),
        ({"image_grid_thw": None}, "image_grid_thw is missing"),
        ({"pixel_values": rows()}, "unknown tensor 'pixel_values'; there may be image_embeds, image_grid_thw$"),
        ({"deepstack_embeds": rows()}, "unknown tensor 'deepstack_embeds'"),
        ({"image_embeds": rows(5)}, r"float32 \[5, 8\]; with this image_grid_thw .* it must be float32.* \[6, 8\]"),
        ({"image_embeds": rows(dtype=torch.float64)}, r"float64 \[6, 8\]"),
        ({"image_embeds": rows().index_fill(0, torch.tensor(3), torch.nan)}, "not finite"),
        ({"image_embeds": rows() * 1e6}, "beyond 65504"),
        ({"image_embeds": "abc"}, "image_embeds is no tensor"),
        ({"image_grid_thw": GRID.float()}, r"image_grid_thw is float32 \[1, 3\]; it must be int64 \[1, 3\]"),
        ({"image_grid_thw": torch.tensor([[1, 4, 6], [1, 4, 6]])}, r"int64 \[2, 3\]"),
        ({"image_grid_thw": torch.tensor([[2, 4, 6]])}, r"\[2, 4, 6\]; a picture's is 1"),
        ({"image_grid_thw": torch.tensor([[1, 3, 8]])}, "multiples of 2"),
        ({"image_grid_thw": torch.tensor([[1, -4, -6]])}, "multiples of 2"),
        ({"image_grid_thw": torch.tensor([[1, 6, 4]])}, None),
        ({"image_grid_thw": torch.tensor([[1, 10, 8]])}, r"20480 pixels; the limit is 16384 \(setting --max-pixels\)"),
        ({"image_grid_thw": torch.tensor([[1, 2**40, 2**40]])}, "the limit is 16384"),
    ],
)
def test_what_is_refused(change, match):
    given = {"image_embeds": rows(), "image_grid_thw": GRID, **change}
    given = {name: value for name, value in given.items() if value is not None}
    if match is None:
        assert check_embeds(given, PLAIN, LIMITS)[1] == (1, 6, 4)
    else:
        refused(given, match)


def test_what_is_refused_of_deepstack_rows():
    grid = {"image_grid_thw": GRID}
    refused({"image_embeds": rows(), **grid}, r"\[6, 8\].*\[6, 24\]", DEEP)
    deep = torch.stack([rows(), rows(), rows()])
    refused({"image_embeds": rows(), "deepstack_embeds": deep, **grid}, r"\[3, 6, 8\].*\[2, 6, 8\]", DEEP)
    both = {"image_embeds": rows(6, 24), "deepstack_embeds": deep[:2], **grid}
    refused(both, r"image_embeds is float32 \[6, 24\].*\[6, 8\]", DEEP)
    bad = deep[:2].clone()
    bad[1, 2, 3] = torch.nan
    refused({"image_embeds": rows(), "deepstack_embeds": bad, **grid}, "not finite", DEEP)


VIDEO = torch.tensor([[3, 4, 6]])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"image_embeds": rows()}, "unknown tensor 'image_embeds'; there may be video_embeds, video_grid_thw, second"),
        ({"video_embeds": None}, "video_embeds is missing"),
        ({"video_embeds": rows(6)}, r"with this video_grid_thw .* \[18, 8\]"),
        ({"video_grid_thw": torch.tensor([[0, 4, 6]])}, "a video's is 1 or more"),
        ({"video_grid_thw": torch.tensor([[5, 4, 6]])}, r"5 temporal patches; the limit is 4 \(setting --max-video-f"),
        ({"timestamps": torch.zeros(2)}, r"timestamps is float32 \[2\]; .* float32 \[3\]"),
        ({"timestamps": torch.tensor([0.0, 2.0, 1.0])}, "back in time"),
        ({"timestamps": torch.tensor([0.0, 1.0, torch.nan])}, "not between 0 and 1e"),
        ({"second_per_grid_ts": torch.tensor([0.0])}, "second_per_grid_ts is 0; it must be above 0"),
        ({"second_per_grid_ts": torch.tensor([1])}, r"is int64 \[1\]"),
    ],
)
def test_what_is_refused_of_a_video(change, match):
    given = {"video_embeds": rows(18), "video_grid_thw": VIDEO, **change}
    given = {name: value for name, value in given.items() if value is not None}
    limits = GridLimits(merge_size=2, patch_size=16, max_pixels=128 * 128, max_patches=4)

    def check():
        check_embeds(given, PLAIN, limits, Modality.VIDEO)
        check_times(given, 3, 2)

    with pytest.raises(BadRequestError, match=match) as caught:
        check()
    assert caught.value.code == "invalid_video_embeds"


def test_times_follow_from_one_another():
    assert check_times({}, 2, 2) == (1.0, (0.25, 1.25))
    assert check_times({"second_per_grid_ts": [0.5]}, 2, 2) == (0.5, (0.125, 0.625))
    assert check_times({"timestamps": [0.5, 2.5, 4.5]}, 3, 2) == (2.0, (0.5, 2.5, 4.5))


WHOLE = save({"image_embeds": rows(), "image_grid_thw": GRID})


def header(fields, tail=b""):
    raw = json.dumps(fields).encode()
    return struct.pack("<Q", len(raw)) + raw + tail


@pytest.mark.parametrize(
    "data",
    [
        b"",
        WHOLE[:-1],
        WHOLE + b"x",
        struct.pack("<Q", 2**60) + b"{}",
        header({"image_embeds": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]}}, bytes(4)),
        header({"image_embeds": {"dtype": "F32", "shape": [1], "data_offsets": [0, 2**50]}}, bytes(4)),
        pickle.dumps({"image_embeds": [1.0]}),
        header({"image_embeds": {"dtype": "F32", "shape": [0, 2**62, 2**62], "data_offsets": [0, 0]}}, b""),
        header({"image_embeds": {"dtype": "F32", "shape": [2**63, 0], "data_offsets": [0, 0]}}, b""),
    ],
    ids=range(9),
)
def test_files_that_are_refused(data):
    with pytest.raises(BadRequestError, match="not a safetensors file") as caught:
        parse_embeds(data)
    assert caught.value.code == "invalid_image_embeds"


def test_a_file_is_read():
    assert torch.equal(parse_embeds(WHOLE)["image_embeds"], rows())


def test_the_identity_is_of_all_that_counts():
    base = rows().numpy()
    other = base.copy()
    other[5, 7] += 1
    digests = {
        embeds_digest((1, 4, 6), base),
        embeds_digest((1, 6, 4), base),
        embeds_digest((1, 4, 6), other),
        embeds_digest((1, 4, 6), base.reshape(3, 16)),
    }
    assert len(digests) == 4
    assert embeds_digest((1, 4, 6), base.copy()) in digests
